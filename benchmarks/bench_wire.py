"""Bytes that a rank sends in a step, by what they are, with tables spread over ranks and whole.

    python benchmarks/bench_wire.py            # about 3 minutes
    python benchmarks/bench_wire.py --smoke    # tiny, to a temporary file; what the tests run

Ranks are simulated, each on a host of its own, and are server and trainer in one. Messages are
counted as the transports pack them, so no number depends on the machine. Protection is erasure with
m = 1 and a commit in every step. Each table has one feature, and ids are drawn by Zipf's law.

The models of both placements must have the same losses. Writes benchmarks/results/wire.csv.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ecrm.placement.table_places import SPREAD, place_tables
from ecrm.placement.tables import Table, row_spaces
from lib import tables
from lib.measure import device, target, write_csv
from lib.wire_bytes import KINDS, OTHER, PARITY, REQUESTS, Case, sent

KAGGLE = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27),
    *(14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Rows of the tables of Criteo's Kaggle set."""

EQUAL = (200_000,) * 26
SKEWED = tuple(int(1e7 / number**1.2) for number in range(1, 27))

FULL = {
    "26 tables of 200,000 rows, 20 ids a bag": Case(EQUAL, 128, 512, 20, 5, 4),
    "26 tables of 200,000 rows, 1 id a bag": Case(EQUAL, 128, 2048, 1, 5, 4),
    "Criteo's Kaggle tables, 20 ids a bag": Case(KAGGLE, 128, 512, 20, 5, 4),
    "tables by Zipf's law, 20 ids a bag": Case(SKEWED, 128, 512, 20, 5, 4),
}
SMOKE = {"6 tables of 200 rows, 20 ids a bag": Case((200,) * 6, 16, 64, 20, 3, 2)}
COLUMNS = (REQUESTS, *dict.fromkeys(KINDS.values()), PARITY, OTHER)


def balance(case: Case) -> dict[str, float]:
    """Rows and looked up ids of the fullest shard over an even share, with whole tables."""
    spaces = row_spaces([Table(f"t{n}", rows, case.dim) for n, rows in enumerate(case.rows)])
    (places,) = place_tables(spaces, case.ranks)
    whole = [home for home in places.homes if home != SPREAD]
    spread = places.homes.count(SPREAD) / case.ranks
    most = max(spread + whole.count(shard) for shard in range(case.ranks))
    return {
        "whole_tables": len(whole),
        "rows_of_fullest": round(places.rows_per_shard * case.ranks / sum(case.rows), 3),
        "lookups_of_fullest": round(most * case.ranks / len(case.rows), 3),
    }


def pooled_alone(case: Case) -> float:
    """Bytes by arithmetic of table-wise sharding alone: ids of 8 bytes, sums and their gradients.

    Without parity, and with whole tables only.
    """
    bags = len(case.rows) * case.samples
    away = (case.ranks - 1) / case.ranks
    return away * bags * (8 * case.ids_per_bag + 2 * 4 * case.dim)


def measured(name: str, case: Case) -> list[dict[str, Any]]:
    """A row of the CSV for each placement."""
    found = {"rows": sent(case, False), "tables": sent(case, True)}
    if found["rows"].loss != found["tables"].loss:
        sys.exit(f"{name}: placements have different losses: report this as a bug")
    return [
        {
            "tables": name,
            "placement": placement,
            "ranks": case.ranks,
            "mb": round(sum(each.mean(kind) for kind in COLUMNS) / 1e6, 3),
            "mb_of_busiest": round(each.most / 1e6, 3),
            **{f"mb {kind}": round(each.mean(kind) / 1e6, 3) for kind in COLUMNS},
            "mb_of_sums_alone": round(pooled_alone(case) / 1e6, 3),
            **balance(case),
        }
        for placement, each in found.items()
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Count, write the CSV, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--csv", type=Path, help="default: benchmarks/results/wire.csv")
    options = parser.parse_args(words)
    warnings.filterwarnings("ignore")
    rows = []
    for name, case in (SMOKE if options.smoke else FULL).items():
        rows += [{**row, **device()} for row in measured(name, case)]
        print("\n".join(tables.wire(rows)), flush=True)
    csv = target("wire.csv", options.csv, options.smoke)
    write_csv(csv, rows)
    print(f"written to {csv}")


if __name__ == "__main__":
    main()

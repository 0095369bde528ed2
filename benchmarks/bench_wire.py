"""Bytes that a rank sends in a step, by what they are, with tables spread over ranks and whole.

    python benchmarks/bench_wire.py            # about 3 minutes
    python benchmarks/bench_wire.py --smoke    # tiny, to a temporary file; what the tests run

Ranks are simulated, each on a host of its own, and are server and trainer in one. Messages are
counted as the transports pack them, so no number depends on the machine. Protection is erasure with
m = 1 and a commit in every step. Each table has one feature. Ids of the first cases are those of
bench_session.py in its embedding-heavy regime; others are drawn by Zipf's law.

The models of both placements must have the same losses. Writes benchmarks/results/wire.csv.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchrec import KeyedJaggedTensor

from ecrm.config import load_config
from ecrm.placement.table_places import SPREAD, place_tables
from ecrm.placement.tables import Table, row_spaces
from lib import tables
from lib.measure import REGIMES, ZIPF, device, prepare, set_words, target, write_csv
from lib.plain_dlrm import open_dataset, read_batch
from lib.wire_bytes import KINDS, OTHER, PARITY, REQUESTS, Case, Draw, drawn, sent

KAGGLE = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27),
    *(14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Rows of the tables of Criteo's Kaggle set."""

EQUAL = (200_000,) * 26
DATA_ROWS = 200_000
SKEWED = tuple(int(1e7 / number**1.2) for number in range(1, 27))

OF_SESSION = {
    "bench_session.py, 20 ids a bag": Case(EQUAL, 128, 512, 20, 5, 4),
    "bench_session.py, 1 id a bag": Case(EQUAL, 128, 2048, 1, 5, 4),
}
FULL = {
    **OF_SESSION,
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


def of_session(folder: Path) -> Draw:
    """The batches that bench_session.py trains on, from data generated into a folder."""
    data = prepare(folder, DATA_ROWS, ZIPF)
    sets = {**REGIMES["embedding-heavy"], "data.path": str(data)}
    config = load_config("quickstart", set_words(sets)[1::2])
    dataset = open_dataset(config)

    def draw(case: Case, step: int, slot: int) -> KeyedJaggedTensor:
        assert tuple(rows for _, rows in dataset.tables) == case.rows
        train = replace(config.train, global_batch=case.ranks * case.samples)
        of_case = replace(config, train=train)
        bags = read_batch(dataset, of_case, step, slot, case.ranks, case.ids_per_bag)
        ids, lengths = bags.sparse_features.values(), bags.sparse_features.lengths()
        keys = [f"f{number}" for number in range(len(case.rows))]
        return KeyedJaggedTensor(keys, ids.long(), lengths=lengths.long())

    return draw


def measured(name: str, case: Case, draw: Draw) -> list[dict[str, Any]]:
    """A row of the CSV for each placement."""
    found = {"rows": sent(case, False, draw), "tables": sent(case, True, draw)}
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
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument("--csv", type=Path, help="default: benchmarks/results/wire.csv")
    options = parser.parse_args(words)
    warnings.filterwarnings("ignore")
    csv = target("wire.csv", options.csv, options.smoke)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in (SMOKE if options.smoke else FULL).items():
            draw = of_session(options.data or Path(scratch)) if name in OF_SESSION else drawn
            rows += [{**row, **device()} for row in measured(name, case, draw)]
            print("\n".join(tables.wire(rows)), flush=True)
            write_csv(csv, rows)
    print(f"written to {csv}")


if __name__ == "__main__":
    main()

"""Bytes that a rank sends in a step, by what they are, with tables spread over ranks and whole.

    python benchmarks/bench_wire.py            # about 10 minutes
    python benchmarks/bench_wire.py --case "tables by Zipf's law, 20 ids a bag"   # keeps all others
    python benchmarks/bench_wire.py --smoke    # tiny, to a temporary file; what the tests run

Ranks are simulated, each on a host of its own, and are server and trainer in one. Messages are
counted as the transports pack them, so no number depends on the machine. Protection is erasure with
m = 1. Whole tables are counted with float32 and with bfloat16 on the wire, and with a commit in
every step or every fourth. Each table has one feature. Bags of unequal length are the ones of
MLPerf's DLRMv2; their whole tables are counted with and without known lengths of bags. Ids of the
first cases are those of bench_session.py in its embedding-heavy regime; others are drawn by Zipf's
law.

All models of a dtype must have the same losses. Writes benchmarks/results/wire.csv.
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

import torch
from torchrec import KeyedJaggedTensor

from ecrm.config import load_config
from ecrm.placement.table_places import SPREAD, place_tables
from ecrm.placement.tables import Table, row_spaces
from lib import tables
from lib.measure import REGIMES, ZIPF, device, prepare, set_words, target, write_csv
from lib.plain_dlrm import open_dataset, read_batch
from lib.wire_bytes import KINDS, OTHER, PARITY, REQUESTS, Case, Draw, Way, drawn, sent

KAGGLE = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27),
    *(14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Rows of the tables of Criteo's Kaggle set."""

EQUAL = (200_000,) * 26
DATA_ROWS = 200_000
SKEWED = tuple(int(1e7 / number**1.2) for number in range(1, 27))

UNEQUAL = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids of a bag by table, in MLPerf's DLRMv2."""

OF_SESSION = {
    "bench_session.py, 20 ids a bag": Case(EQUAL, 128, 512, (20,) * 26, 5, 4),
    "bench_session.py, 1 id a bag": Case(EQUAL, 128, 2048, (1,) * 26, 5, 4),
}
FULL = {
    **OF_SESSION,
    "Criteo's Kaggle tables, 20 ids a bag": Case(KAGGLE, 128, 512, (20,) * 26, 5, 4),
    "Criteo's Kaggle tables, 1 to 100 ids a bag": Case(KAGGLE, 128, 512, UNEQUAL, 3, 2),
    "tables by Zipf's law, 20 ids a bag": Case(SKEWED, 128, 512, (20,) * 26, 5, 4),
    "tables by Zipf's law, 1 to 100 ids a bag": Case(SKEWED, 128, 512, UNEQUAL, 3, 2),
}
SMOKE = {
    "6 tables of 200 rows, 20 ids a bag": Case((200,) * 6, 16, 64, (20,) * 6, 3, 2),
    "6 tables of 200 rows, 2 or 20 ids a bag": Case((200,) * 6, 16, 64, (20, 2, 2) * 2, 3, 2),
}
TWO_BYTES = torch.bfloat16
COLUMNS = (REQUESTS, *dict.fromkeys(KINDS.values()), PARITY, OTHER)


def ways(case: Case) -> list[Way]:
    """The ways of a case that are counted."""
    if len(set(case.bags)) > 1:
        return [Way(), Way(True), Way(True, True), Way(True, True, TWO_BYTES)]
    return [Way(), Way(True), Way(True, False, TWO_BYTES), Way(True, False, TWO_BYTES, 4)]


def balance(case: Case, way: Way) -> dict[str, float]:
    """Rows and looked up ids of the fullest shard over an even share."""
    if not way.whole_tables:
        return {"whole_tables": 0, "rows_of_fullest": 1, "lookups_of_fullest": 1}
    spaces = row_spaces(
        [
            Table(f"t{n}", rows, case.dim, lookups=bag if way.factors else 1)
            for n, (rows, bag) in enumerate(zip(case.rows, case.bags, strict=True))
        ]
    )
    (places,) = place_tables(spaces, case.ranks)
    held = [0.0] * case.ranks
    for bag, home in zip(case.bags, places.homes, strict=True):
        for shard in range(case.ranks) if home == SPREAD else (home,):
            held[shard] += bag / (case.ranks if home == SPREAD else 1)
    return {
        "whole_tables": len(places.homes) - places.homes.count(SPREAD),
        "rows_of_fullest": round(places.rows_per_shard * case.ranks / sum(case.rows), 3),
        "lookups_of_fullest": round(max(held) * case.ranks / sum(case.bags), 3),
    }


def pooled_alone(case: Case) -> float:
    """Bytes by arithmetic of table-wise sharding alone: ids of 8 bytes, sums and their gradients.

    Without parity, and with whole tables only.
    """
    away = (case.ranks - 1) / case.ranks
    return away * case.samples * sum(8 * bag + 2 * 4 * case.dim for bag in case.bags)


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
        bags = read_batch(dataset, of_case, step, slot, case.ranks, case.bags[0])
        ids, lengths = bags.sparse_features.values(), bags.sparse_features.lengths()
        keys = [f"f{number}" for number in range(len(case.rows))]
        return KeyedJaggedTensor(keys, ids.long(), lengths=lengths.long())

    return draw


def measured(name: str, case: Case, draw: Draw) -> list[dict[str, Any]]:
    """A row of the CSV for each way."""
    found = {way: sent(case, way, draw) for way in ways(case)}
    for dtype in (torch.float32, TWO_BYTES):
        if len({each.loss for way, each in found.items() if way.wire_dtype == dtype}) > 1:
            sys.exit(f"{name}: placements have different losses: report this as a bug")
    return [
        {
            "tables": name,
            "placement": way.placement,
            "wire_dtype": str(way.wire_dtype).removeprefix("torch."),
            "commit_interval": way.commit_interval,
            "ranks": case.ranks,
            "mb": round(sum(each.mean(kind) for kind in COLUMNS) / 1e6, 3),
            "mb_of_busiest": round(each.most / 1e6, 3),
            **{f"mb {kind}": round(each.mean(kind) / 1e6, 3) for kind in COLUMNS},
            "mb_of_sums_alone": round(pooled_alone(case) / 1e6, 3),
            **balance(case, way),
        }
        for way, each in found.items()
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Count, write the CSV, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=FULL, action="append", help="default: all")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument("--csv", type=Path, help="default: benchmarks/results/wire.csv")
    options = parser.parse_args(words)
    warnings.filterwarnings("ignore")
    csv = target("wire.csv", options.csv, options.smoke)
    kept = (tables.read_rows(csv) or ()) if options.case else ()
    rows = [row for row in kept if row["tables"] not in options.case]
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in (SMOKE if options.smoke else FULL).items():
            if options.case and name not in options.case:
                continue
            draw = of_session(options.data or Path(scratch)) if name in OF_SESSION else drawn
            rows += [{**row, **device()} for row in measured(name, case, draw)]
            rows.sort(key=lambda row: [*FULL, *SMOKE].index(row["tables"]))
            print("\n".join(tables.wire(rows)), flush=True)
            write_csv(csv, rows)
    print(f"written to {csv}")


if __name__ == "__main__":
    main()

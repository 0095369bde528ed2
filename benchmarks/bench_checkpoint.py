"""What writing and loading a checkpoint takes on one rank: rows of 64 floats with row-wise Adagrad, all updated, no network.

Writes benchmarks/results/checkpoint.csv and prints it. `--smoke` takes few rows and writes to a temporary file.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from measure import device, target, write_csv
from tables import checkpoint

from ecrm.checkpoint.folder import CheckpointFolder, find
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.checkpoint.restore import Restorer
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.placement.tables import Table
from ecrm.simulate.oracle import Alone
from ecrm.simulate.workload import Workload, make_engine

WINDOW = 1 << 16


def engine_of(rows: int, durable: Restorer | None = None) -> Engine:
    """The engine of the only rank of a run with one table."""
    alone = Workload(tables=(Table("a", rows, 64),), servers=1, trainers=1, spares=0, layout="colocated", protection="none", k=1, m=0)
    return make_engine(alone, Alone(), Hooks(), time.monotonic, durable)


def measure(rows: int, mode: str, folder: Path) -> dict[str, object]:
    """Seconds of one checkpoint in that mode, of training waiting for it, of checking it and of loading it."""
    engine, told = engine_of(rows), []
    for first in range(0, rows, WINDOW):
        window = torch.arange(first, min(first + WINDOW, rows))
        engine.hosted[0, 0].update(window, torch.ones(window.numel(), 64), False)
    checkpoints = Checkpoints(engine, CheckpointFolder(folder), {}, CheckpointPolicy(steps=1, every_steps=1, mode=mode), told.append)
    engine.step = engine.committed = 1
    checkpoints.finish()
    (event,) = told
    checkpoint = find(folder)[0][0]
    began = time.monotonic()
    for entry in checkpoint.manifest.files:
        checkpoint.check(entry)
    checked = time.monotonic()
    loaded = engine_of(rows, Restorer(CheckpointFolder(folder)))
    began_load = time.monotonic()
    loaded.resume()
    ended = time.monotonic()
    assert torch.equal(loaded.hosted[0, 0].store.weights, engine.hosted[0, 0].store.weights)
    return {
        "mode": mode,
        "rows": rows,
        "bytes": event["bytes"],
        "seconds": round(event["seconds"], 3),
        "stall_seconds": round(event["stall_seconds"], 3),
        "check_seconds": round(checked - began, 3),
        "load_seconds": round(ended - began_load, 3),
        **device(),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measure both modes in turn and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few rows, to a temporary file")
    parser.add_argument("--csv", type=Path, help="where to write; default: benchmarks/results/checkpoint.csv")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    rows, repeats = (10_000, 1) if options.smoke else (1_000_000, 3)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            for mode in ("sync", "async"):
                records.append(measure(rows, mode, Path(folder) / f"{mode}{number}" / "checkpoints"))
                print(records[-1], flush=True)
    csv = target("checkpoint.csv", options.csv, options.smoke)
    write_csv(csv, records)
    print("\n".join(checkpoint(records)))
    print(f"written to {csv}")


if __name__ == "__main__":
    main()

"""What writing and loading a checkpoint takes on one rank: rows of 64 floats with row-wise Adagrad, all updated, no network.

The yardstick is torch.distributed.checkpoint, its `save` and `async_save` of the same tensors with its defaults, in the same process:
it syncs files as ECRM does, and has no checksums, so that there is nothing to check.
Writes benchmarks/results/checkpoint.csv and prints it. `--smoke` takes few rows and writes to a temporary file.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
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


def trained(rows: int) -> Engine:
    """An engine whose rows have all been updated."""
    engine = engine_of(rows)
    for first in range(0, rows, WINDOW):
        window = torch.arange(first, min(first + WINDOW, rows))
        engine.hosted[0, 0].update(window, torch.ones(window.numel(), 64), False)
    return engine


def measure(rows: int, mode: str, folder: Path) -> dict[str, object]:
    """Seconds of one checkpoint in that mode, of training waiting for it, of checking it and of loading it."""
    engine, told = trained(rows), []
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
    return _row(mode, rows, event["bytes"], event["seconds"], event["stall_seconds"], checked - began, ended - began_load)


def quietly(call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """The call, without the warning that torch.distributed is not in use: one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        return call(*arguments, **more)


def yardstick(rows: int, mode: str, folder: Path) -> dict[str, object]:
    """The same by torch.distributed.checkpoint."""
    tensors = {f"part {number}": part for number, part in enumerate(trained(rows).hosted[0, 0].store.memory)}
    began = time.monotonic()
    if mode == "torch sync":
        quietly(torch.distributed.checkpoint.save, tensors, checkpoint_id=folder)
        waited = time.monotonic()
    else:
        future = quietly(torch.distributed.checkpoint.async_save, tensors, checkpoint_id=folder)
        waited = time.monotonic()
        future.result()
    durable = time.monotonic()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    began_load = time.monotonic()
    quietly(torch.distributed.checkpoint.load, loaded, checkpoint_id=folder)
    ended = time.monotonic()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return _row(mode, rows, size, durable - began, waited - began, None, ended - began_load)


def _row(
    mode: str, rows: int, size: int, seconds: float, stall: float, check: float | None, load: float
) -> dict[str, object]:
    return {
        "mode": mode,
        "rows": rows,
        "bytes": size,
        "seconds": round(seconds, 3),
        "stall_seconds": round(stall, 3),
        "check_seconds": "" if check is None else round(check, 3),
        "load_seconds": round(load, 3),
        **device(),
    }


CONTENDERS = {"sync": measure, "async": measure, "torch sync": yardstick, "torch async": yardstick}


def main(words: Sequence[str] | None = None) -> None:
    """Measure all in turn and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few rows, to a temporary file")
    parser.add_argument("--csv", type=Path, help="where to write; default: benchmarks/results/checkpoint.csv")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    rows, repeats = (10_000, 1) if options.smoke else (1_000_000, 3)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            for mode, contender in CONTENDERS.items():
                records.append(contender(rows, mode, Path(folder) / f"{mode}{number}" / "checkpoints"))
                print(records[-1], flush=True)
    csv = target("checkpoint.csv", options.csv, options.smoke)
    write_csv(csv, records)
    print("\n".join(checkpoint(records)))
    print(f"written to {csv}")


if __name__ == "__main__":
    main()

"""What checkpoints take: one of one rank, and many beside training.

    python benchmarks/bench_checkpoint.py                             # both
    python benchmarks/bench_checkpoint.py --part alone
    python benchmarks/bench_checkpoint.py --part beside --regime dense-heavy --rounds 1
    python benchmarks/bench_checkpoint.py --part beside --add         # add rounds to the CSV file

1. `alone`: rows of 64 floats with row-wise Adagrad, all updated, no network. The yardstick is
   torch.distributed.checkpoint, its `save` and `async_save` of the same tensors with its defaults,
   in the same process: it syncs files as ECRM does, and has no checksums, so that there is nothing
   to check. Writes checkpoint.csv.
2. `beside`: the training runs of bench_protections.py on pre-touched tables, without any other
   protection, with a checkpoint every 10 s of training. The cost of one is how much longer the
   steps from it to the next take than if all were like those that begin half a second after it is
   on the disk. Steps with and without it alternate within one run. What noting changed rows costs
   is in all steps, and not in this. Beside it stands what the disk alone takes for as many bytes,
   written past the page cache and synced by as many processes as the run has servers. The first
   checkpoint after pre-touching is not counted: it is full, and its memory is new. Writes
   checkpoint_runs.csv.

`--smoke` takes few rows and writes to a temporary folder.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint
from bench_protections import FULL, TINY, Regime, of_kind, regime_of, run

from ecrm.checkpoint.disk import Disk
from ecrm.checkpoint.folder import CheckpointFolder, find
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.checkpoint.restore import Restorer
from ecrm.checkpoint.row_file import SummedFile
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.placement.tables import Table
from ecrm.testing.simulate.oracle import Alone
from ecrm.testing.simulate.workload import Workload, make_engine
from lib.disturbance import around_a_checkpoint
from lib.measure import REGIME_DATA, device, prepare, target, write_csv
from lib.table_rows import read_rows
from lib.tables import checkpoint, checkpoint_runs

WINDOW = 1 << 16


def engine_of(rows: int, durable: Restorer | None = None) -> Engine:
    """The engine of the only rank of a run with one table."""
    alone = Workload(
        tables=(Table("a", rows, 64),),
        servers=1,
        trainers=1,
        spares=0,
        layout="colocated",
        protection="none",
        k=1,
        m=0,
    )
    return make_engine(alone, Alone(), Hooks(), time.monotonic, durable)


def trained(rows: int) -> Engine:
    """An engine whose rows have all been updated."""
    engine = engine_of(rows)
    for first in range(0, rows, WINDOW):
        window = torch.arange(first, min(first + WINDOW, rows))
        engine.state.hosted[0, 0].update(window, torch.ones(window.numel(), 64), False, 0)
    return engine


def measure(rows: int, mode: str, folder: Path) -> dict[str, object]:
    """Seconds of one checkpoint in that mode, of waiting for it, checking it and loading it."""
    engine, told = trained(rows), []
    checkpoints = Checkpoints(
        engine,
        CheckpointFolder(folder),
        {},
        CheckpointPolicy(steps=1, every_steps=1, mode=mode),
        told.append,
    )
    engine.state.step = engine.state.committed = 1
    checkpoints.finish()
    (event,) = told
    checkpoint = find(folder)[0][0]
    began = time.monotonic()
    for entry in checkpoint.manifest.files:
        checkpoint.check(entry)
    checked = time.monotonic()
    loaded = engine_of(rows, Restorer(CheckpointFolder(folder)))
    began_load = time.monotonic()
    loaded.recovery.resume()
    ended = time.monotonic()
    assert torch.equal(
        loaded.state.hosted[0, 0].store.weights, engine.state.hosted[0, 0].store.weights
    )
    return _row(
        mode,
        rows,
        event.bytes,
        event.seconds,
        event.stall_seconds,
        checked - began,
        ended - began_load,
    )


def quietly(call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """The call, without the warning that torch.distributed is not in use: one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        return call(*arguments, **more)


def yardstick(rows: int, mode: str, folder: Path) -> dict[str, object]:
    """The same by torch.distributed.checkpoint."""
    tensors = {
        f"part {number}": part
        for number, part in enumerate(trained(rows).state.hosted[0, 0].store.memory)
    }
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


MODES = {
    "sync": {"checkpoint.mode": "sync"},
    "async": {"checkpoint.mode": "async"},
    "incremental": {
        "checkpoint.mode": "async",
        "checkpoint.kind": "incremental",
        "checkpoint.full_every": 1_000,
    },
}
"""Of checkpoints beside training; of incremental ones the first alone is full."""
WRITER_SECONDS = 60.0
CALM_AFTER = 0.5
"""Seconds after a checkpoint is on the disk, from which on steps count as undisturbed."""


def beside(
    folder: Path, regime: Regime, seconds: float, intervals: int, round_: int, megabytes: float
) -> list[dict[str, object]]:
    """A row for each checkpoint of a run in each of `MODES`, in random order.

    The disk takes `megabytes` a second.
    """
    sets = {**regime.sets, "protection.name": "none"}
    record, _ = run(folder, {**sets, "train.steps": regime.warm + 40})
    begun, ended = (dict(record.finished)[step] for step in (regime.warm, regime.warm + 40))
    every = max(4, round(40 * seconds / (ended - begun)))
    first = -(-regime.warm // every) * every
    rows = []
    for mode in random.sample(list(MODES), len(MODES)):
        steps = first + (intervals + 1) * every
        record, events = run(
            folder, {**sets, **MODES[mode], "checkpoint.every_steps": every, "train.steps": steps}
        )
        for event in of_kind(events, "checkpoint"):
            if not first < event["step"] < steps:
                continue
            excess, step = around_a_checkpoint(
                record.finished, event["step"], every, event["time"] + CALM_AFTER * (seconds >= 10)
            )
            rows.append(
                {
                    "regime": regime.name,
                    "round": round_,
                    "mode": mode,
                    "step": event["step"],
                    "every_steps": every,
                    "rows": event["rows"],
                    "bytes": event["bytes"],
                    "step_ms": round(1e3 * step, 2),
                    "overhead": round(excess / (every * step), 4),
                    "excess_ms": round(1e3 * excess, 1),
                    "stall_ms": round(1e3 * event["stall_seconds"], 1),
                    "durable_seconds": round(event["seconds"], 3),
                    "disk_mb_per_second": round(megabytes),
                    **device(),
                }
            )
        mine = [row["overhead"] for row in rows if row["mode"] == mode]
        print(
            f"{regime.name:>15} round {round_} {mode:<12} overhead of each checkpoint {mine}",
            flush=True,
        )
    return rows


def disk_speed(folder: Path, size: int, writers: int) -> float:
    """MB/s of `size` bytes written as checkpoints are, by as many processes as a run has.

    From the first byte of the first writer until the file of the last one is synced. The best of
    three.
    """
    context = multiprocessing.get_context("fork")
    seconds = []
    for _ in range(3):
        together, spans = context.Barrier(writers), context.Queue()
        share = (folder, size // writers, together, spans)
        processes = [context.Process(target=_write, args=(n, *share)) for n in range(writers)]
        for process in processes:
            process.start()
        began, ended = zip(*[spans.get(timeout=WRITER_SECONDS) for _ in processes], strict=True)
        seconds.append(max(ended) - min(began))
        for process in processes:
            process.join()
    return size // writers * writers / 1e6 / min(seconds)


def _write(number: int, folder: Path, size: int, together: Any, spans: Any) -> None:
    """A writer of `disk_speed`, told apart by `number`: puts when it began and ended."""
    data, path = np.ones(size, np.uint8), folder / f"speed-{number}"
    together.wait(WRITER_SECONDS)
    began = time.monotonic()
    with SummedFile(Disk(), path) as file:
        file.write(data)
    spans.put((began, time.monotonic()))
    path.unlink()


def measure_beside(options: argparse.Namespace, folder: Path) -> None:
    """Measure, write checkpoint_runs.csv after every regime of every round, and print it."""
    size, seconds, intervals = (TINY, 0.5, 2) if options.smoke else (FULL, 10.0, 5)
    csv = options.runs_csv or target("checkpoint_runs.csv", None, options.smoke)
    rows = list(read_rows(csv) or []) if options.add else []
    speed = disk_speed(folder, 1 << 20 if options.smoke else 1 << 29, size.servers)
    first = 1 + max((int(row["round"]) for row in rows), default=-1)
    for number in range(first, first + options.rounds):
        for name in options.regime or REGIME_DATA:
            regime = regime_of(
                name,
                prepare(options.data or folder, size.rows, REGIME_DATA[name]),
                options.data or folder,
                size,
            )
            rows += beside(folder / "run", regime, seconds, intervals, number, speed)
            write_csv(csv, rows)
    print("\n".join(checkpoint_runs(rows)))
    print(f"written to {csv}")


def measure_alone(options: argparse.Namespace, folder: Path) -> None:
    """Measure all in turn, write checkpoint.csv and print it."""
    rows, repeats = (10_000, 1) if options.smoke else (1_000_000, 3)
    records = []
    for number in range(repeats):
        for mode, contender in CONTENDERS.items():
            records.append(contender(rows, mode, folder / f"{mode}{number}" / "checkpoints"))
            print(records[-1], flush=True)
    csv = target("checkpoint.csv", options.csv, options.smoke)
    write_csv(csv, records)
    print("\n".join(checkpoint(records)))
    print(f"written to {csv}")


def main(words: Sequence[str] | None = None) -> None:
    """Measure what is asked for and write the CSV files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="few rows, to a temporary folder")
    parser.add_argument("--part", choices=("alone", "beside"), help="only this")
    parser.add_argument(
        "--csv",
        type=Path,
        help="where to write `alone`; default: benchmarks/results/checkpoint.csv",
    )
    parser.add_argument(
        "--runs-csv",
        type=Path,
        help="where to write `beside`; default: benchmarks/results/checkpoint_runs.csv",
    )
    parser.add_argument(
        "--regime", choices=tuple(REGIME_DATA), action="append", help="of `beside`, only this"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of `beside`")
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep the rounds of `beside` that the CSV file has and add to them",
    )
    parser.add_argument("--data", type=Path, help="folder to keep the prepared data in")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.part != "beside":
            measure_alone(options, Path(folder))
        if options.part != "alone":
            measure_beside(options, Path(folder))


if __name__ == "__main__":
    main()

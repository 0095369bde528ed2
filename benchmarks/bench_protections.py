"""Every protection beside every other: what a step costs under it, what it sends, writes and holds, and what a SIGKILL costs.

    python benchmarks/bench_protections.py                     # all of it
    python benchmarks/bench_protections.py --rounds 1          # the same, less often
    python benchmarks/bench_protections.py --smoke             # a minute or two, tiny; what the tests run
    python benchmarks/bench_protections.py --table             # nothing is run: what the CSV files say, and the bars

Contenders are in contenders.py, with the scaling of checkpoint intervals. Training is real, under mpirun, on 5 colocated ranks and a
spare. Regimes: dense-heavy and embedding-heavy (measure.REGIMES, generated rows), and criteo: real rows (`--criteo`), going round them.

1. Calibration, once per regime: a run with synchronous checkpoints says how long one takes; that gives the intervals.
2. A short undisturbed run of each contender, once: bytes sent and written per step, memory, and that the model is that of `none`.
3. Rounds: each contender once, in random order, the same steps. Rank 1, a server and trainer, SIGKILLs itself in the update phase of a step
   drawn for the round. Steps before it give the cost of normal operation, as a ratio to `none` in the same round; what follows the
   cost of the kill. `none` is not killed: it could not go on.

An average step leaves out the time in which training waits for a checkpoint; that is added as seconds waited per checkpoint over the steps of an
interval, so that it does not matter how many happen to lie before the kill. The finished model of each run is compared with that
of `none` by SHA-256. Writes protections.csv, protections_bytes.csv, protections_accuracy.csv and protections_timeline.csv.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import measure
from contenders import CONTENDERS, PAPER, REBUILD_ROWS, SMOKE, Contender, Setting, interval_steps
from disturbance import calm, cost, timeline
from tables import TableError, read_rows
from versus import bars, memory_bar, overheads, summary_lines

from ecrm.drill.events import parse_events
from ecrm.drill.record import RunRecord, run_record
from ecrm.train.profile import STEP_PHASES

VICTIM = 1
WARM_STEPS = 4
"""Steps at the start that no number comes from: they touch memory for the first time."""
CRITEO_DEFAULT = Path(__file__).resolve().parents[2] / "shared" / "data"


@dataclass(frozen=True)
class Size:
    """How much is run: servers that train too, steps of a run, of an undisturbed one, samples of a slot by regime, generated rows, rows of a table."""

    servers: int
    steps: int
    quiet_steps: int
    slot_batch: Mapping[str, int]
    rows: int
    most_rows: int | None = None


FULL = Size(5, 120, 16, {"dense-heavy": 256, "embedding-heavy": 512, "criteo": 64}, rows=500_000)
TINY = Size(3, 24, 6, {"dense-heavy": 16, "embedding-heavy": 16, "criteo": 16}, rows=4_000, most_rows=500)


@dataclass(frozen=True)
class Regime:
    """A model, its data and the batch: `sets` are config keys."""

    name: str
    sets: Mapping[str, Any]


def regime_of(name: str, data: Path, size: Size) -> Regime:
    """The settings that all contenders of a regime share."""
    batch = size.servers * size.slot_batch[name]
    sets = {
        **measure.REGIMES.get(name, {}),
        "data.path": str(data),
        "data.eval_fraction": 0.1 if name == "criteo" else 0.01,
        "model.dense_arch": "native",
        "train.epochs": 0,
        "train.global_batch": batch,
        "train.log_every_steps": 10,
        "cluster.layout": "colocated",
        "cluster.servers": size.servers,
        "cluster.trainers": size.servers,
        "cluster.spares": 1,
        "protection.rebuild_rows_per_step": REBUILD_ROWS,
        "protection.verify_parity_at_end": False,
    }
    if size.most_rows:
        sets["model.max_rows_per_table"] = size.most_rows
    return Regime(name, sets)


def run(folder: Path, sets: Mapping[str, Any], kills: Sequence[str] = ()) -> tuple[RunRecord, list[dict[str, Any]]]:
    """The record and the events of one run, whose folder, with its checkpoints or mapped files, is removed."""
    summary = measure.run(folder, sets, kills)
    events, damaged = parse_events((folder / "events.jsonl").read_text())
    shutil.rmtree(folder)
    return run_record(events, summary, damaged_lines=damaged), list(events)


def of_kind(events: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event["event"] == kind]


@dataclass(frozen=True)
class Calibration:
    """Seconds of a step without checkpoints, and seconds and bytes of a synchronous checkpoint, both at about the step of a kill."""

    step_seconds: float
    checkpoint_seconds: float
    checkpoint_bytes: int

    def interval(self, contender: Contender, setting: Setting) -> int:
        """Steps between that contender's checkpoints; 0 for none."""
        if not contender.minutes:
            return 0
        return interval_steps(setting, contender.minutes, self.checkpoint_seconds, self.step_seconds)


def calibrate(folder: Path, regime: Regime, steps: int) -> Calibration:
    """Measure a run of `steps` steps with one synchronous checkpoint in the middle and one at the end."""
    middle = max(steps // 2, WARM_STEPS + 2)
    sets = {**regime.sets, **CONTENDERS["checkpoint-30-sync"].sets, "train.steps": steps, "checkpoint.every_steps": middle}
    record, events = run(folder, sets)
    written = of_kind(events, "checkpoint")
    before = calm(record, WARM_STEPS, steps, written)
    last = written[-1]
    return Calibration(before.step_seconds, last["stall_seconds"], last["bytes"])


def quiet_row(folder: Path, regime: Regime, name: str, steps: int, calibration: Calibration, setting: Setting) -> dict[str, Any]:
    """Bytes of an undisturbed run of a contender, as a row of protections_bytes.csv."""
    contender = CONTENDERS[name]
    every = calibration.interval(contender, setting)
    record, events = run(folder, {**regime.sets, **contender.sets, "train.steps": steps, "checkpoint.every_steps": steps if every else 0})
    summary = record.summary
    sent = sum(rank["sent"].get(phase, 0) for rank in summary["traffic_bytes_per_rank"] for phase in STEP_PHASES)
    written = sum(rank["written"] for rank in summary["traffic_bytes_per_rank"])
    held = summary["memory_bytes"]
    return {
        "regime": regime.name,
        "contender": name,
        "steps": steps,
        "sent_bytes_per_step": round(sent / steps),
        "written_bytes_per_step": round(calibration.checkpoint_bytes / every if every else written / steps),
        "rows_bytes": held["data"],
        "redundancy_bytes": held["parity"],
        "undo_bytes": held["undo"],
        "resident_bytes": sum(rank["resident"] for rank in summary["memory_bytes_per_rank"]),
        "model_sha256": summary["model_sha256"],
    }


def killed_row(
    folder: Path, regime: Regime, name: str, number: int, steps: int, kill_step: int, every: int
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """One run of a round: its row of protections.csv, its evaluations and its time line."""
    contender = CONTENDERS[name]
    sets = {**regime.sets, **contender.sets, "train.steps": steps, "train.eval_every_steps": steps // 8, "checkpoint.every_steps": every}
    kills = [f"{VICTIM}@{kill_step}:update"] if contender.survives else []
    record, events = run(folder, sets, kills)
    written = of_kind(events, "checkpoint")
    dead = sorted(rank for failure in record.failures for rank in failure.ranks)
    if dead != ([VICTIM] if kills else []):
        sys.exit(f"{regime.name}, {name}: ranks {dead} died, not what was to be measured")
    try:
        before = calm(record, WARM_STEPS, kill_step, written)
        found = cost(record, before) if kills else None
    except ValueError as error:
        sys.exit(f"{regime.name}, {name}, round {number}: {error}")
    # The one after the last step does not come at the interval, and rolled back runs write some again: unless there is no other.
    inside = [event for event in written if event["step"] <= kill_step] or written
    waited = statistics.fmean(event["stall_seconds"] for event in inside) if every else 0.0
    batch = sets["train.global_batch"]
    row = {
        "regime": regime.name,
        "round": number,
        "contender": name,
        "servers": sets["cluster.servers"],
        "global_batch": batch,
        "steps": steps,
        "kill_step": kill_step,
        "step_ms": _ms(before.step_seconds),
        "checkpoint_every_steps": every or "",
        "checkpoint_wait_ms": _ms(waited) if every else "",
        "checkpoint_bytes": inside[-1]["bytes"] if every else "",
        "step_with_checkpoints_ms": _ms(before.step_seconds + (waited / every if every else 0.0)),
        **dict.fromkeys(("gap_ms", "lost_ms", "recovery_ms", "redone_steps", "rolled_back", "whole_after_s", "kept_recovering", "kept_rebuilding"), ""),
        "eval_auc": _six(record.summary["eval_auc"]),
        "model_sha256": record.summary["model_sha256"],
    }
    if found is not None:
        row |= {
            "gap_ms": _ms(found.gap),
            "lost_ms": _ms(found.lost),
            "recovery_ms": _ms(found.recovery),
            "redone_steps": found.redone,
            "rolled_back": bool(of_kind(events, "rolled_back")),
            "whole_after_s": "" if found.whole_after is None else round(found.whole_after, 3),
            "kept_recovering": round(found.kept_recovering, 4),
            "kept_rebuilding": "" if found.kept_rebuilding is None else round(found.kept_rebuilding, 4),
        }
    about = {"regime": regime.name, "contender": name}
    origin = record.failures[0].began_at if kills else None
    evaluations = [
        {**about, "step": event["step"], "seconds": "" if origin is None else round(event["time"] - origin, 3),
         "auc": _six(event["auc"]), "log_loss": _six(event["log_loss"])}
        for event in of_kind(events, "evaluation")
    ]  # fmt: skip
    spans = [
        {**about, "begin": round(begin, 4), "end": round(end, 4), "new_samples": new * batch} for begin, end, new in timeline(record)
    ]
    return row, evaluations, spans


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def _six(value: float | None) -> float | str:
    """Rounded; empty where there is none, as the AUC of rows that all have one label."""
    return "" if value is None else round(value, 6)


def kill_step_of(number: int, steps: int) -> int:
    """A step between a third and half of a run, which leaves time to rebuild; not one that begins after an evaluation."""
    drawn = random.Random(f"kill {number}").randrange(steps // 3, steps // 2)
    return drawn + (drawn % (steps // 8) == 0)


def contenders_of(regime: str, wanted: Sequence[str]) -> list[str]:
    """Those of `wanted` that run on a regime; the sweep on embedding-heavy alone."""
    return [name for name in wanted if not CONTENDERS[name].sweep or regime == "embedding-heavy"]


def real_rows(given: Path | None) -> Iterator[Path]:
    """Files of real Criteo rows; none, with a line, where none was asked for and the default is not there. Ends the program for a wrong path."""
    at = given or CRITEO_DEFAULT
    files = sorted(path for path in at.iterdir() if path.name.endswith((".txt", ".gz"))) if at.is_dir() else [at]
    if files and all(path.is_file() for path in files):
        yield from files
    elif given is not None:
        sys.exit(f"--criteo {given}: no file there, and no folder with files that end in .txt or .gz")
    else:
        print(f"criteo left out: no rows in {at}; name a file or folder with --criteo", flush=True)


def prepare_real(folder: Path, files: Sequence[Path]) -> Path:
    """Those files, prepared."""
    data = folder / "criteo"
    if not data.exists():
        measure.ecrm("prepare", "criteo", *map(str, files), "--output", str(data))
    return data


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help=f"steps of a run; default {FULL.steps}")
    parser.add_argument("--regime", choices=("dense-heavy", "embedding-heavy", "criteo"), action="append")
    parser.add_argument("--contender", choices=tuple(CONTENDERS), action="append", help="only these, and none")
    parser.add_argument("--criteo", type=Path, help="real rows: a file, or a folder with .txt or .gz files; default ../shared/data")
    parser.add_argument("--storage-gbit", type=float, default=PAPER.storage_gbit, help="assumed Gbit/s that a server of the papers writes")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--table", action="store_true", help="run nothing: print what the CSV files say")
    parser.add_argument("--data", type=Path, help="folder to keep the prepared data in")
    parser.add_argument("--output", type=Path, help="folder of the CSV files; default benchmarks/results")
    options = parser.parse_args(words)
    if options.steps is not None and options.steps < 24:
        parser.error(f"--steps {options.steps}: at least 24, so that there are steps to measure before and after the kill")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    if options.storage_gbit <= 0:
        parser.error(f"--storage-gbit {options.storage_gbit:g}: must be above 0")
    return options


class Files:
    """The four CSV files, written anew whenever rows were added, so that a run that is cut off leaves what it has measured."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._about = folder, measure.device()
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ("", "_bytes", "_accuracy", "_timeline")}

    def add(self, kind: str, rows: Sequence[dict[str, Any]]) -> None:
        self.rows[kind] += [{**row, **self._about} if kind in ("", "_bytes") else row for row in rows]
        if self.rows[kind]:
            measure.write_csv(self._folder / f"protections{kind}.csv", self.rows[kind])


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    output = measure.target("", options.output, options.smoke)
    if not options.table:
        with tempfile.TemporaryDirectory() as scratch:
            compare(options, output, options.data or Path(scratch), Path(scratch))
    try:
        rows, sizes = (read_rows(output / f"protections{kind}.csv") for kind in ("", "_bytes"))
    except TableError as error:
        sys.exit(str(error))
    if rows is None or sizes is None:
        sys.exit(f"there is no {output / 'protections.csv'} with protections_bytes.csv beside it: run without --table first")
    print("\n".join(summary_lines(rows)))
    for bar in (*bars(rows), *memory_bar(sizes)):
        print(bar)


def compare(options: argparse.Namespace, output: Path, data: Path, scratch: Path) -> None:
    """Run it all and write the CSV files."""
    size = TINY if options.smoke else FULL
    size = replace(size, steps=options.steps or size.steps)
    rounds = 1 if options.smoke else options.rounds
    wanted = [name for name in (SMOKE if options.smoke else CONTENDERS) if not options.contender or name in (*options.contender, "none")]
    setting = replace(PAPER, storage_gbit=options.storage_gbit)
    files = Files(output)
    regimes = []
    for name in options.regime or (["embedding-heavy"] if options.smoke else ["dense-heavy", "embedding-heavy", "criteo"]):
        if name != "criteo":
            regimes.append(regime_of(name, measure.prepare(data, size.rows), size))
        elif real := list(real_rows(options.criteo)):
            regimes.append(regime_of(name, prepare_real(data, real), size))
    calibrations = {}
    for regime in regimes:
        found = calibrations[regime.name] = calibrate(scratch / f"{regime.name}-calibration", regime, kill_step_of(0, size.steps))
        every = {minutes: interval_steps(setting, minutes, found.checkpoint_seconds, found.step_seconds) for minutes in (30, 60)}
        print(f"{regime.name:>15}: {1e3 * found.step_seconds:.0f} ms a step, a checkpoint {found.checkpoint_seconds:.2f} s and "
              f"{found.checkpoint_bytes / 1e6:,.0f} MB; 30 and 60 minutes become {every[30]} and {every[60]} steps", flush=True)  # fmt: skip
        for name in contenders_of(regime.name, wanted):
            if not CONTENDERS[name].sweep:
                files.add("_bytes", [quiet_row(scratch / f"{regime.name}-{name}", regime, name, size.quiet_steps, found, setting)])
    for number in range(rounds):
        kill_step = kill_step_of(number, size.steps)
        for regime in regimes:
            order = contenders_of(regime.name, wanted)
            random.Random(f"{regime.name} {number}").shuffle(order)
            for name in order:
                every = calibrations[regime.name].interval(CONTENDERS[name], setting)
                folder = scratch / f"{regime.name}-{name}-{number}"
                row, evaluations, spans = killed_row(folder, regime, name, number, size.steps, kill_step, every)
                files.add("", [row])
                if number == 0:
                    files.add("_accuracy", evaluations)
                    files.add("_timeline", spans)
                shown = {key: row[key] for key in ("step_with_checkpoints_ms", "lost_ms", "redone_steps", "whole_after_s", "kept_recovering")}
                print(f"{regime.name:>15} round {number} {name:<24} {json.dumps(shown)}", flush=True)
        for name, middle in overheads(files.rows[""]).items():
            print(f"{name[0]:>15} {name[1]:<24} overhead so far {statistics.median(middle):+.1%}", flush=True)


if __name__ == "__main__":
    main()

"""Every protection beside every other: what a step costs, what is sent and held, what a kill costs.

    python benchmarks/bench_protections.py                     # all of it
    python benchmarks/bench_protections.py --rounds 1          # fewer rounds
    python benchmarks/bench_protections.py --regime criteo     # one of three; others keep theirs
    python benchmarks/bench_protections.py --add               # add rounds to the CSV files
    python benchmarks/bench_protections.py --part bytes        # part 2 alone
    python benchmarks/bench_protections.py --part accuracy     # part 5 alone
    python benchmarks/bench_protections.py --smoke             # five minutes, tiny
    python benchmarks/bench_protections.py --table             # run nothing, print the CSV files

Contenders are in lib/contenders.py, with the scaling of checkpoint intervals. Training is real,
under mpirun, on 5 colocated ranks and a spare. Regimes: dense-heavy and embedding-heavy
(measure.REGIMES) on generated rows (measure.REGIME_DATA), and criteo on real rows (`--criteo`),
which are repeated. Tables of the first two are pre-touched (lib/pre_touched.py): checkpoints and
rebuilding meet tables that were trained everywhere. Nothing is measured before that.

1. Calibration, once per regime. A run with synchronous checkpoints says how long one takes. That
   gives the intervals.
2. A short undisturbed run of each contender, on tables that are not pre-touched: bytes sent per
   step, and the most memory of all ranks together (lib/memory.py).
3. Rounds. First what steps cost: contenders and `none` are interleaved (lib/interleaved.py), on
   tables that are not pre-touched and without checkpoints. Starts differ by some percent, so there
   are several. Contenders that write checkpoints in the background have both, at their interval.
   Then each contender runs once, in random order. Rank 1, a server and trainer, SIGKILLs itself in
   the update phase of a step. With checkpoints the kill comes half an interval after one: as many
   steps are redone as on average. The interval before it, with one checkpoint, gives the waiting
   that is the overhead of synchronous checkpoints. Without them, the cost of the kill is told from
   the steps after pre-touching and those after all is rebuilt. `none` is not killed: it could not
   go on.
4. Sizes, a part of a round: erasure interleaved with `none`, and synchronous checkpoints at one
   interval in seconds, with smaller and smaller tables; embedding-heavy.
5. Accuracy: some contenders with evaluations, on tables that are not pre-touched, killed once.
   `stateless` runs once more, restored so slowly that evaluations fall into the time without the
   shard.

The finished model of each run of a round is compared by SHA-256 with that of an undisturbed run of
`none` of as many steps. Writes protections.csv and protections_bytes.csv, _size.csv, _accuracy.csv
and _timeline.csv.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ecrm.data.dataset_info import read_manifest
from ecrm.drill.run_record import RunRecord, run_record
from ecrm.run.profile import STEP_PHASES
from ecrm.run.reading import parse_events
from lib import measure
from lib.contenders import (
    CONTENDERS,
    FULL_EVERY,
    PAPER,
    REBUILD_ROWS,
    SMOKE,
    Contender,
    Setting,
    interval_steps,
)
from lib.disturbance import Calm, calm, cost, timeline, usual
from lib.interleaved import ENDLESS, Beside, RunFailed, run_interleaved
from lib.memory import PeakMemory
from lib.pre_touched import pre_touch
from lib.protection_files import REGIMES, Files
from lib.protection_tables import protections_bytes
from lib.table_rows import TableError, read_rows
from lib.versus import auc_differences, bars, overheads, summary_lines

VICTIM = 1
STEPS_APART = 100
CRITEO_DEFAULT = Path(__file__).resolve().parents[2] / "shared" / "data"


@dataclass(frozen=True)
class Size:
    """How much is run.

    `servers` train too. `before`: steps before the kill where there are no checkpoints; `after`:
    steps after any kill. `quiet_steps`: of a short undisturbed run; `accuracy_steps`: of one with
    evaluations, every `eval_every`. `least_interval`: steps between checkpoints. `slot_batch`:
    samples of a slot, `most_rows`: cap of the rows of a table, by regime. `rows`: generated.
    `warm`: steps after pre-touching that no number comes from; `turns_after`: steps of an
    interleaved run before its first turn. The heap of a rank touches new pages in its first 40
    steps, or 150 with a commit in every 16th step.
    `shares` of the cap and contenders `sized` are compared by size; those `evaluated` by accuracy.
    Contenders interleaved with `none` are started `starts` times and get `turns` in all, of
    `turn_seconds` by regime.
    """

    servers: int
    before: int
    after: int
    quiet_steps: int
    accuracy_steps: int
    eval_every: int
    least_interval: int
    slot_batch: Mapping[str, int]
    most_rows: Mapping[str, int]
    rows: int
    shares: tuple[float, ...]
    sized: tuple[str, ...]
    evaluated: tuple[str, ...]
    starts: int
    turns: int
    turn_seconds: Mapping[str, float]
    warm: int
    turns_after: int


FULL = Size(
    5,
    80,
    60,
    16,
    160,
    10,
    8,
    {"dense-heavy": 256, "embedding-heavy": 2048, "criteo": 64},
    {"dense-heavy": 100_000, "embedding-heavy": 40_000, "criteo": 10_000},
    rows=2_000_000,
    shares=(0.5, 0.25, 0.125),
    sized=("erasure-k4", "checkpoint-30-sync"),
    evaluated=("none", "erasure-k4", "checkpoint-30-sync", "stateless-30"),
    starts=3,
    turns=15,
    turn_seconds={"dense-heavy": 1.5, "embedding-heavy": 2.5, "criteo": 0.7},
    warm=40,
    turns_after=160,
)
TINY = Size(
    3,
    8,
    10,
    6,
    20,
    4,
    6,
    {"dense-heavy": 16, "embedding-heavy": 16, "criteo": 16},
    {"dense-heavy": 500, "embedding-heavy": 500, "criteo": 500},
    rows=4_000,
    shares=(0.5,),
    sized=("erasure-k2", "checkpoint-30-sync"),
    evaluated=("none", "erasure-k2", "stateless-30"),
    starts=2,
    turns=4,
    turn_seconds={"dense-heavy": 0.7, "embedding-heavy": 0.7, "criteo": 0.7},
    warm=4,
    turns_after=4,
)


@dataclass(frozen=True)
class Regime:
    """A model, its data and the batch.

    `sets` are config keys. `plain` is the data that pre-touches nothing. Nothing is measured in the
    first `warm` steps. A shard has `shard_rows` rows.
    """

    name: str
    sets: Mapping[str, Any]
    plain: Path
    warm: int
    shard_rows: int


def regime_of(name: str, data: Path, folder: Path, size: Size, share: float = 1.0) -> Regime:
    """The settings that all contenders of a regime share; the pre-touched data goes to `folder`."""
    batch, most = size.servers * size.slot_batch[name], int(share * size.most_rows.get(name, 0))
    sets = {
        **measure.REGIMES.get(name, {}),
        "data.path": str(data),
        "data.eval_fraction": 0.1 if name == "criteo" else 0.01,
        "train.epochs": 0,
        "train.global_batch": batch,
        "train.log_every_steps": 10,
        "storage.prefault": True,
        "cluster.layout": "colocated",
        "cluster.servers": size.servers,
        "cluster.trainers": size.servers,
        "cluster.spares": 1,
        "protection.rebuild_share": 1,
        "protection.rebuild_rows_per_step": REBUILD_ROWS[name],
        "protection.verify_parity_at_end": False,
    }
    warm, manifest = size.warm, read_manifest(data)
    if name == "criteo":
        # once through the rows, so that the tables' pages and records are there
        warm += math.ceil(0.9 * manifest["rows"] / batch)
    if most:
        sets["model.max_rows_per_table"] = most
        if name != "criteo":
            into = folder / f"pre-touched-{data.name}-{most}-{batch}"
            warm += pre_touch(data, into, most, batch)
            sets["data.path"] = str(into)
    rows = sum(min(rows, most) if most else rows for rows in manifest["tables"].values())
    return Regime(name, sets, data, warm, rows // size.servers)


@dataclass(frozen=True)
class Plan:
    """When a contender writes checkpoints and is killed.

    `every`: steps between checkpoints, 0 for none. Steps after `first` are its normal operation.
    `steps` of the run are enough to rebuild everything.
    """

    every: int
    first: int
    kill_step: int
    steps: int


def plan_of(regime: Regime, contender: Contender, every: int, size: Size, number: int) -> Plan:
    """With checkpoints, the kill comes half an interval after one.

    That is the first with a whole interval around it after pre-touching. Where checkpoints are
    incremental, there is also a full one before it. Without checkpoints, the kill comes half a
    commit interval after a commit.
    """
    per_step = contender.sets.get("protection.rebuild_rows_per_step", REBUILD_ROWS[regime.name])
    after = max(
        size.after, math.ceil(4 / 3 * regime.shard_rows * (1 + contender.redundancy) / per_step)
    )
    if contender.kind.needs_checkpoints and not contender.kind.rolls_back:
        after *= 2  # reads the files twice, a few pieces a step
    if not every:
        begin, latest = regime.warm + size.before, size.before // 4
        interval = contender.sets.get("protection.commit_interval", 1)
        steps = random.Random(f"kill {number}").sample(range(begin, begin + latest), latest)
        kill = min(steps, key=lambda step: abs(step % interval - interval // 2))
        return Plan(0, regime.warm, kill, _rounded(begin + latest + after))
    checkpoints = math.ceil((regime.warm + every / 2) / every)
    if contender.sets.get("checkpoint.kind") == "incremental":
        checkpoints = max(checkpoints, math.ceil(regime.warm / every) + 1)
        checkpoints += (checkpoints - 1) % FULL_EVERY == 0  # that one is full
    kill = checkpoints * every + every // 2
    return Plan(every, kill - every, kill, _rounded(kill + after))


def _rounded(steps: int) -> int:
    """Up to a multiple of STEPS_APART, so that contenders share undisturbed runs."""
    return -(-steps // STEPS_APART) * STEPS_APART


class References:
    """The undisturbed model of `none`, by regime and number of steps; each is trained once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[tuple[str, int], str] = {}

    def of(self, regime: Regime, steps: int) -> str:
        """Its SHA-256."""
        if (regime.name, steps) not in self._found:
            record, _ = run(
                self._folder, {**regime.sets, **CONTENDERS["none"].sets, "train.steps": steps}
            )
            self._found[regime.name, steps] = record.summary["model_sha256"]
        return self._found[regime.name, steps]


class NotMeasured(Exception):
    """A run was not what was to be measured; the message says why."""


def run(
    folder: Path, sets: Mapping[str, Any], kills: Sequence[str] = ()
) -> tuple[RunRecord, list[dict[str, Any]]]:
    """The record and the events of one run. Its folder is removed, with checkpoints and files.

    Raises NotMeasured where the run failed.
    """
    try:
        summary = measure.run(folder, sets, kills)
        events, damaged = parse_events((folder / "events.jsonl").read_text())
    except SystemExit as error:
        raise NotMeasured(str(error)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return run_record(events, summary, damaged_lines=damaged), list(events)


def of_kind(events: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event["event"] == kind]


@dataclass(frozen=True)
class Calibration:
    """A step without checkpoints, and a synchronous checkpoint of pre-touched tables."""

    step_seconds: float
    checkpoint_seconds: float
    checkpoint_bytes: int

    def interval(self, contender: Contender, setting: Setting, least: int) -> int:
        """Steps between that contender's checkpoints, at least `least`; 0 for none."""
        if not contender.minutes:
            return 0
        return max(
            least,
            interval_steps(setting, contender.minutes, self.checkpoint_seconds, self.step_seconds),
        )


def calibrate(folder: Path, regime: Regime, size: Size) -> Calibration:
    """Measure a run with three synchronous checkpoints after pre-touching."""
    every = max(size.before // 2, 2)
    first = math.ceil(regime.warm / every) * every
    sets = {
        **regime.sets,
        **CONTENDERS["checkpoint-30-sync"].sets,
        "train.steps": first + 2 * every,
        "checkpoint.every_steps": every,
    }
    record, events = run(folder, sets)
    written = [event for event in of_kind(events, "checkpoint") if event["step"] >= first]
    before = calm(record, first, first + 2 * every, written)
    seconds = statistics.median(event["stall_seconds"] for event in written)
    return Calibration(
        before.step_seconds - before.waiting / before.steps, seconds, written[-1]["bytes"]
    )


def quiet_row(folder: Path, regime: Regime, name: str, steps: int) -> dict[str, Any]:
    """Bytes and memory of an undisturbed run of a contender, as a row of protections_bytes.csv.

    With checkpoints it writes one in the middle and one at the end.
    """
    contender = CONTENDERS[name]
    sets = {**regime.sets, **contender.sets, "data.path": str(regime.plain), "train.steps": steps}
    with PeakMemory(folder) as memory:
        record, _ = run(
            folder, {**sets, "checkpoint.every_steps": steps // 2 if contender.minutes else 0}
        )
    summary = record.summary
    sent = sum(
        rank["sent"].get(phase, 0)
        for rank in summary["traffic_bytes_per_rank"]
        for phase in STEP_PHASES
    )
    written = sum(rank["written"] for rank in summary["traffic_bytes_per_rank"])
    held = summary["memory_bytes"]
    return {
        "regime": regime.name,
        "contender": name,
        "steps": steps,
        "sent_bytes_per_step": round(sent / steps),
        "written_bytes_per_step": "" if contender.minutes else round(written / steps),
        "rows_bytes": held["data"],
        "redundancy_bytes": held["parity"],
        "undo_bytes": held["undo"],
        "peak_bytes": memory.bytes,
        "model_sha256": summary["model_sha256"],
    }


def quiet_rows(
    folder: Path, regime: Regime, wanted: Sequence[str], size: Size, files: Files
) -> None:
    """`quiet_row` of each contender that has none yet, those of the sweep left out."""
    for name in wanted:
        if not CONTENDERS[name].sweep and not files.has("_bytes", regime.name, name):
            rows = tried(lambda name=name: [quiet_row(folder, regime, name, size.quiet_steps)])
            files.add("_bytes", rows)


ABREAST = 3
"""Contenders that are interleaved with `none` at a time: so many runs fit into memory."""


def steps_cost(contender: Contender) -> bool:
    """Whether interleaved runs show what the contender costs.

    They do not where it differs from `none` in nothing but waiting for checkpoints.
    """
    return contender is not CONTENDERS["none"] and (
        not (contender.kind.rolls_back and contender.kind.needs_checkpoints)
        or contender.in_background
    )


def interleaved(
    folder: Path, regime: Regime, names: Sequence[str], size: Size, every: Mapping[str, int]
) -> dict[str, list[Beside]]:
    """Steps of each of `names` beside those of `none`, by start.

    Contenders that write checkpoints in the background have one `every` so many steps, in a single
    start, since turns must see whole intervals. Those that wait for checkpoints have none. What
    failed is printed and left out.
    """
    found: dict[str, list[Beside]] = {}
    for behind in (False, True):
        these = [name for name in names if CONTENDERS[name].in_background == behind]
        # What a checkpoint costs depends on the rows that were trained; steps do not.
        data, warm = (
            (regime.sets["data.path"], regime.warm + size.turns_after)
            if behind
            else (str(regime.plain), size.turns_after)
        )
        for begin in range(0, len(these), ABREAST):
            abreast = these[begin : begin + ABREAST]
            runs = {
                name: {**regime.sets, **CONTENDERS[name].sets, "data.path": data}
                for name in ("none", *abreast)
            }
            for name, sets in runs.items():
                sets["checkpoint.every_steps"] = (
                    every[name]
                    if CONTENDERS[name].in_background
                    else ENDLESS
                    if CONTENDERS[name].minutes
                    else 0
                )
            starts = 1 if behind else size.starts
            for _ in range(starts):
                try:
                    steps = run_interleaved(
                        runs,
                        folder,
                        warm,
                        max(1, size.turns // starts),
                        size.turn_seconds[regime.name],
                    )
                except (RunFailed, ValueError) as error:
                    print(
                        f"left out: {regime.name}, {', '.join(abreast)} interleaved: {error}",
                        flush=True,
                    )
                    continue
                for name in abreast:
                    found.setdefault(name, []).append(Beside(steps[name], steps["none"]))
    return found


def overheads_of(contender: Contender, before: Calm, beside: Sequence[Beside]) -> list[float]:
    """What undisturbed training loses with a contender, as a share, by start.

    It loses time to waiting for checkpoints (`before`) and to slower steps (`beside` those of
    `none`). Empty where the latter should have been measured and were not.
    """
    waits = waiting(before) if contender.minutes and not contender.in_background else 0.0
    if not steps_cost(contender):
        return [round(waits, 4)]
    return [
        round(waits + (start.mean_overhead if contender.in_background else start.overhead), 4)
        for start in beside
    ]


def waiting(before: Calm) -> float:
    """Share by which waiting for its checkpoint lengthens an interval."""
    return before.waiting / (before.steps * before.step_seconds - before.waiting)


def killed_row(
    folder: Path,
    regime: Regime,
    name: str,
    number: int,
    plan: Plan,
    references: References,
    beside: Sequence[Beside] = (),
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One run of a round: its row of protections.csv and its time line."""
    contender = CONTENDERS[name]
    sets = {
        **regime.sets,
        **contender.sets,
        "train.steps": plan.steps,
        "checkpoint.every_steps": plan.every,
    }
    record, events = run(
        folder, sets, [f"{VICTIM}@{plan.kill_step}:update"] if contender.survives else []
    )
    written = of_kind(events, "checkpoint")
    dead = sorted(rank for failure in record.failures for rank in failure.ranks)
    if dead != ([VICTIM] if contender.survives else []):
        raise NotMeasured(f"{regime.name}, {name}: ranks {dead} died, not what was to be measured")
    try:
        before = calm(record, plan.first, plan.kill_step, written)
        step_seconds = (
            before.step_seconds if plan.every or not contender.survives else usual(record, before)
        )
        found = cost(record, step_seconds) if contender.survives else None
    except ValueError as error:
        raise NotMeasured(f"{regime.name}, {name}, round {number}: {error}") from None
    inside = [event for event in written if plan.first < event["step"] <= plan.kill_step]
    back = of_kind(events, "rolled_back")
    if plan.every and back and back[0]["step"] != plan.kill_step // plan.every * plan.every:
        raise NotMeasured(
            f"{regime.name}, {name}: went back to step {back[0]['step']}: "
            "the checkpoint before the kill was not written yet"
        )
    batch, held = sets["train.global_batch"], record.summary["memory_bytes"]
    costs = [] if name == "none" else overheads_of(contender, before, beside)
    row = {
        "regime": regime.name,
        "round": number,
        "contender": name,
        "servers": sets["cluster.servers"],
        "global_batch": batch,
        "steps": plan.steps,
        "kill_step": plan.kill_step,
        "step_ms": _ms(before.step_seconds),
        "overhead": round(statistics.median(costs), 4) if costs else "",
        "overhead_by_start": " ".join(map(str, costs)),
        "checkpoint_every_steps": plan.every or "",
        "checkpoint_wait_ms": _ms(before.waiting) if plan.every else "",
        "checkpoint_bytes": inside[-1]["bytes"] if inside else "",
        "rows_bytes": held["data"],
        "redundancy_bytes": held["parity"],
        **dict.fromkeys(KILLED, ""),
        "model_sha256": record.summary["model_sha256"],
        "undisturbed_sha256": references.of(regime, plan.steps),
    }
    if found is not None:
        row |= {
            "gap_ms": _ms(found.gap),
            "lost_ms": _ms(found.lost),
            "lost_whole_ms": _ms(found.lost_whole),
            "recovery_ms": _ms(found.recovery),
            "redone_steps": found.redone,
            "lost_steps": sum(
                account["lost_steps"]
                for event in of_kind(events, "restored")
                for account in event["shards"]
            ),
            "rolled_back": bool(back),
            "whole_after_s": "" if found.whole_after is None else round(found.whole_after, 3),
            "kept_recovering": round(found.kept_recovering, 4),
            "kept_rebuilding": ""
            if found.kept_rebuilding is None
            else round(found.kept_rebuilding, 4),
        }
    spans = [
        {
            "regime": regime.name,
            "contender": name,
            "begin": round(begin, 4),
            "end": round(end, 4),
            "new_samples": new * batch,
        }
        for begin, end, new in timeline(record)
    ]
    return row, spans


KILLED = (
    "gap_ms",
    "lost_ms",
    "lost_whole_ms",
    "recovery_ms",
    "redone_steps",
    "lost_steps",
    "rolled_back",
    "whole_after_s",
    "kept_recovering",
    "kept_rebuilding",
)
"""Columns of protections.csv that are empty for a run that was not killed."""


def size_rows(
    folder: Path, data: Path, size: Size, seconds: float, number: int
) -> Iterator[dict[str, Any]]:
    """Overhead on tables of every share of the cap, as rows of protections_size.csv.

    Checkpoints are written every `seconds`.
    """
    for share in (1.0, *size.shares):
        regime = regime_of("embedding-heavy", data, data.parent, size, share)
        beside = interleaved(
            folder,
            regime,
            [name for name in size.sized if not CONTENDERS[name].minutes],
            replace(size, starts=1),
            {},
        )
        if not beside:
            continue
        found = {
            name: (statistics.median(start.overhead for start in mine), "", "")
            for name, mine in beside.items()
        }
        every = max(
            size.least_interval,
            round(seconds / statistics.mean(next(iter(beside.values()))[0].others)),
        )
        for name in (name for name in size.sized if CONTENDERS[name].minutes):
            plan = plan_of(regime, CONTENDERS[name], every, size, number)
            sets = {
                **regime.sets,
                **CONTENDERS[name].sets,
                "train.steps": plan.kill_step + 1,
                "checkpoint.every_steps": plan.every,
            }
            record, events = run(folder, sets)
            before = calm(record, plan.first, plan.kill_step, of_kind(events, "checkpoint"))
            found[name] = waiting(before), plan.every, _ms(before.waiting)
        for name, (overhead, steps, wait) in found.items():
            yield {
                "regime": regime.name,
                "round": number,
                "share": share,
                "contender": name,
                "rows_bytes": record.summary["memory_bytes"]["data"],
                "overhead": round(overhead, 4),
                "checkpoint_every_steps": steps,
                "checkpoint_wait_ms": wait,
            }


SLOWLY = " slowly"
"""Suffix of a contender whose lost shard is restored slowly.

All of its rows would take as many steps as the run has; rows that were not trained take none.
"""


def accuracy_rows(folder: Path, regime: Regime, size: Size) -> Iterator[dict[str, Any]]:
    """AUC and log loss on held-out rows along runs, as rows of protections_accuracy.csv.

    There is a checkpoint each quarter of a run, or an eighth later where a shard is away then. A
    server is killed half-way between the first two.
    """
    steps, every = size.accuracy_steps, size.accuracy_steps // 4
    slowly = {"protection.rebuild_rows_per_step": max(1, regime.shard_rows // steps)}
    runs = [(name, name, {}) for name in size.evaluated] + [
        (f"{name}{SLOWLY}", name, slowly) for name in size.evaluated if name.startswith("stateless")
    ]
    for label, name, more in runs:
        contender = CONTENDERS[name]
        sets = {
            **regime.sets,
            **contender.sets,
            "data.path": str(regime.plain),
            "train.steps": steps,
            "train.eval_every_steps": size.eval_every,
            "checkpoint.every_steps": every if contender.minutes else 0,
            **more,
        }
        record, events = run(
            folder, sets, [f"{VICTIM}@{every + every // 2}:update"] if contender.survives else []
        )
        began = record.finished[0][1]
        killed = "" if not record.failures else round(record.failures[0].began_at - began, 3)
        for event in of_kind(events, "evaluation"):
            yield {
                "regime": regime.name,
                "contender": label,
                "step": event["step"],
                "seconds": round(event["time"] - began, 3),
                "killed_seconds": killed,
                "shards_away": len(event["shards_away"]),
                "auc": _six(event["values"]["auc"]),
                "log_loss": _six(event["values"]["logloss"]),
            }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def _six(value: float | None) -> float | str:
    """Rounded; empty where there is none, as the AUC of rows that all have one label."""
    return "" if value is None else round(value, 6)


def contenders_of(regime: str, wanted: Sequence[str]) -> list[str]:
    """Those of `wanted` that run on a regime; the sweep on embedding-heavy alone."""
    return [name for name in wanted if not CONTENDERS[name].sweep or regime == "embedding-heavy"]


def real_rows(given: Path | None) -> Iterator[Path]:
    """Files of real Criteo rows.

    Empty, with a line, where none was asked for and the default is not there. Ends the program for
    a wrong path.
    """
    at = given or CRITEO_DEFAULT
    files = (
        sorted(path for path in at.iterdir() if path.name.endswith((".txt", ".gz")))
        if at.is_dir()
        else [at]
    )
    if files and all(path.is_file() for path in files):
        yield from files
    elif given is not None:
        sys.exit(
            f"--criteo {given}: no file there, and no folder with files that end in .txt or .gz"
        )
    else:
        print(f"criteo left out: no rows in {at}; name a file or folder with --criteo", flush=True)


def prepare_real(folder: Path, files: Sequence[Path]) -> Path:
    """Those files, prepared."""
    data = folder / "criteo"
    if not data.exists():
        measure.ecrm("prepare", "criteo", *map(str, files), "--output", str(data))
    return data


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--regime", choices=REGIMES, action="append")
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep the rounds that the CSV files have and add to them, on the machine that they "
        "are of",
    )
    parser.add_argument(
        "--part",
        choices=("bytes", "accuracy"),
        help="only this part, in place of what its CSV file says",
    )
    parser.add_argument(
        "--contender", choices=tuple(CONTENDERS), action="append", help="only these, and none"
    )
    parser.add_argument(
        "--criteo",
        type=Path,
        help="real rows: a file, or a folder with .txt or .gz files; default ../shared/data",
    )
    parser.add_argument(
        "--storage-gbit",
        type=float,
        default=PAPER.storage_gbit,
        help="assumed Gbit/s that a server of the papers writes",
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument(
        "--table", action="store_true", help="run nothing: print what the CSV files say"
    )
    parser.add_argument("--data", type=Path, help="folder to keep the prepared data in")
    parser.add_argument(
        "--output", type=Path, help="folder of the CSV files; default benchmarks/results"
    )
    options = parser.parse_args(words)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    if options.part and (options.add or options.table):
        parser.error(f"--part {options.part} measures the part anew: without --add and --table")
    if options.storage_gbit <= 0:
        parser.error(f"--storage-gbit {options.storage_gbit:g}: must be above 0")
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    try:
        run_or_tell(options, measure.target("", options.output, options.smoke))
    except TableError as error:
        sys.exit(str(error))


def run_or_tell(options: argparse.Namespace, output: Path) -> None:
    """Run it all unless only the table is asked for, and print what the CSV files say.

    Raises TableError for a file that says nothing.
    """
    if not options.table:
        with tempfile.TemporaryDirectory() as scratch:
            compare(options, output, options.data or Path(scratch), Path(scratch))
    part = f"_{options.part}" if options.part else ""
    told = output / f"protections{part}.csv"
    rows = read_rows(told)
    if rows is None:
        sys.exit(
            f"there is no {told}: "
            + ("nothing was measured" if part else "run without --table first")
        )
    if options.part == "accuracy":
        for (regime, name), value in auc_differences(rows).items():
            print(f"{regime:>15} {name:<24} final AUC less that of none {value:+.4f}")
        return
    if options.part == "bytes":
        print("\n".join(protections_bytes(rows)))
        return
    print("\n".join(summary_lines(rows)))
    for bar in bars(rows):
        print(bar)


def compare(options: argparse.Namespace, output: Path, data: Path, scratch: Path) -> None:
    """Run it all and write the CSV files."""
    size = TINY if options.smoke else FULL
    wanted = [
        name
        for name in (SMOKE if options.smoke else CONTENDERS)
        if not options.contender or name in (*options.contender, "none")
    ]
    # which are compared with each other
    sized = size.sized if set(size.sized) <= set(wanted) else ()
    size = replace(
        size, sized=sized, evaluated=tuple(name for name in size.evaluated if name in wanted)
    )
    names = options.regime or (["embedding-heavy"] if options.smoke else list(REGIMES))
    setting, files, folder = (
        replace(PAPER, storage_gbit=options.storage_gbit),
        Files(output, names, options.add, options.part and f"_{options.part}"),
        scratch / "run",
    )
    regimes = []
    for name in names:
        if name != "criteo":
            regimes.append(
                regime_of(
                    name, measure.prepare(data, size.rows, measure.REGIME_DATA[name]), data, size
                )
            )
        elif real := list(real_rows(options.criteo)):
            regimes.append(regime_of(name, prepare_real(data, real), data, size))
    if not options.part:
        side_by_side(options, regimes, wanted, size, setting, files, folder)
    for regime in regimes:
        if options.part == "bytes":
            quiet_rows(folder, regime, wanted, size, files)
        elif not files.has("_accuracy", regime.name):
            files.add("_accuracy", tried(lambda regime=regime: accuracy_rows(folder, regime, size)))


def side_by_side(
    options: argparse.Namespace,
    regimes: Sequence[Regime],
    wanted: Sequence[str],
    size: Size,
    setting: Setting,
    files: Files,
    folder: Path,
) -> None:
    """Everything but the accuracy."""
    names, rounds, references = (
        [regime.name for regime in regimes],
        1 if options.smoke else options.rounds,
        References(folder),
    )
    intervals: dict[tuple[str, str], int] = {}
    seconds: dict[str, float] = {}
    for regime in regimes:
        found = calibrate(folder, regime, size)
        intervals |= {
            (regime.name, name): found.interval(CONTENDERS[name], setting, size.least_interval)
            for name in CONTENDERS
        }
        seconds[regime.name] = setting.checkpoints_per_interval(30) * found.checkpoint_seconds
        print(
            f"{regime.name:>15}: {1e3 * found.step_seconds:.0f} ms a step, "
            f"a checkpoint {found.checkpoint_seconds:.2f} s and "
            f"{found.checkpoint_bytes / 1e6:,.0f} MB; "
            f"30 minutes become {seconds[regime.name]:.1f} s, "
            f"{intervals[regime.name, 'checkpoint-30-sync']} steps; {regime.warm} steps to warm up",
            flush=True,
        )
        quiet_rows(folder, regime, wanted, size, files)
    first = files.next_round(names)
    for number in range(first, first + rounds):
        for regime in regimes:
            order = contenders_of(regime.name, wanted)
            every = {name: intervals[regime.name, name] for name in order}
            beside = interleaved(
                folder,
                regime,
                [
                    name
                    for name in order
                    if steps_cost(CONTENDERS[name]) and not CONTENDERS[name].sweep
                ],
                size,
                every,
            )
            random.Random(f"{regime.name} {number}").shuffle(order)
            for name in order:
                plan = plan_of(regime, CONTENDERS[name], intervals[regime.name, name], size, number)
                found = tried(
                    lambda name=name, plan=plan, regime=regime: [
                        killed_row(
                            folder, regime, name, number, plan, references, beside.get(name, ())
                        )
                    ]
                )
                if not found:
                    continue
                ((row, spans),) = found
                files.add("", [row])
                shown = CONTENDERS[name].timeline and not files.has("_timeline", regime.name, name)
                files.add("_timeline", spans if shown else [])
                shown = {
                    key: row[key]
                    for key in (
                        "overhead",
                        "lost_ms",
                        "lost_whole_ms",
                        "redone_steps",
                        "whole_after_s",
                        "kept_recovering",
                    )
                }
                print(
                    f"{regime.name:>15} round {number} {name:<24} {json.dumps(shown)}", flush=True
                )
            if regime.name == "embedding-heavy":
                files.add(
                    "_size",
                    tried(
                        lambda regime=regime: size_rows(
                            folder, regime.plain, size, seconds[regime.name], number
                        )
                    ),
                )
        for name, middle in overheads(files.rows[""]).items():
            print(
                f"{name[0]:>15} {name[1]:<24} overhead so far {statistics.median(middle):+.1%}",
                flush=True,
            )


def tried(measured: Callable[[], Iterable[Any]]) -> list[Any]:
    """What it gives until a run cannot be measured, which is printed; the others go on."""
    found: list[Any] = []
    try:
        for each in measured():
            found.append(each)
    except (NotMeasured, ValueError) as error:
        print(f"left out: {error}", flush=True)
    return found


if __name__ == "__main__":
    main()

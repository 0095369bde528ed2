"""Compare the records of both runs: the drill's numbers, notes and verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ecrm.base.wording import counted
from ecrm.drill.options import Disturbance
from ecrm.drill.run_record import RunRecord
from ecrm.drill.throughput import Pace, before_during_after, pace, spans
from ecrm.drill.timeline import Timeline, timeline

NOISE = 0.1
"""The least relative difference in throughput between equal parts of runs for a note."""

JUDGED_STEPS = 10
"""The least number of steps to judge throughput by."""


@dataclass(frozen=True)
class Report:
    """A drill's result.

    `paces` are by name: "undisturbed", "before", "during", "after", and "disturbed" for the whole
    disturbed run. `problems` is empty if and only if the drill passed; `notes` say what the numbers
    leave out. `global_batch` is `None` if the number of samples in a step is unknown.
    """

    name: str
    global_batch: int | None
    disturbance: Disturbance
    undisturbed: RunRecord
    disturbed: RunRecord
    paces: dict[str, Pace]
    line: Timeline
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def hashes(self) -> tuple[str | None, str | None]:
        """model_sha256 of the undisturbed and of the disturbed run.

        `None` for an incomplete run.
        """
        return self.undisturbed.summary.get("model_sha256"), self.disturbed.summary.get(
            "model_sha256"
        )

    @property
    def equal(self) -> bool:
        """Whether both runs completed with the same model, bit for bit."""
        first, second = self.hashes
        return first is not None and first == second

    @property
    def exact(self) -> bool:
        """Whether the undisturbed model is promised; if not, a different model is no failure."""
        return promises_the_same_model(self.disturbed)

    @property
    def unit(self) -> str:
        """The unit of throughput."""
        return "steps/s" if self.global_batch is None else "samples/s"

    def rate(self, name: str) -> float | None:
        """The pace called `name`, in `unit`; `None` for a pace without time."""
        pace = self.paces[name]
        return pace.steps_per_second if self.global_batch is None else pace.samples_per_second

    def difference(self, name: str) -> float | None:
        """A number of the summary, disturbed less undisturbed; `None` if missing in a run."""
        first, second = self.undisturbed.summary.get(name), self.disturbed.summary.get(name)
        return None if first is None or second is None else second - first

    def ratio(self, name: str) -> float | None:
        """The pace called `name` as a multiple of the undisturbed run's pace."""
        mine, whole = (
            self.paces[name].steps_per_second,
            self.paces["undisturbed"].steps_per_second,
        )
        return None if mine is None or not whole else mine / whole

    def since_start(self, time: float | None) -> float | None:
        """Seconds from the start of the disturbed run to a time in seconds since the epoch."""
        return self.disturbed.since_start(time)


def promises_the_same_model(run: RunRecord) -> bool:
    """Whether the finished model of a run must equal the model of an undisturbed run.

    The models must be equal if the protection is exact, or if the run restored no shard.
    """
    return run.summary.get("protection", {}).get("exact", True) or not run.summary.get("restored")


def make_report(
    name: str,
    global_batch: int | None,
    disturbance: Disturbance,
    undisturbed: RunRecord,
    disturbed: RunRecord,
    reason: str | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Compare the runs; `reason` is why the disturbed run did not complete, `None` if complete."""
    paces = {
        "undisturbed": pace(spans(undisturbed), global_batch),
        **before_during_after(disturbed, global_batch),
        "disturbed": pace(spans(disturbed), global_batch),
    }
    return Report(
        name=name,
        global_batch=global_batch,
        disturbance=disturbance,
        undisturbed=undisturbed,
        disturbed=disturbed,
        paces=paces,
        line=timeline(undisturbed, disturbed, global_batch),
        notes=(*notes, *_notes(undisturbed, disturbed), *_noise(paces)),
        problems=tuple(problems(disturbance, undisturbed, disturbed, reason)),
    )


def problems(
    disturbance: Disturbance,
    undisturbed: RunRecord,
    disturbed: RunRecord,
    reason: str | None = None,
) -> list[str]:
    """Why the drill failed, one line per reason; empty when the drill passed.

    A drill passes when both runs completed, every kill happened, the models are equal or need not
    be, and no stripe has wrong parity at the end.
    """
    found = []
    if not undisturbed.completed:
        found.append("the undisturbed run did not complete")
    if not disturbed.completed:
        found.append(f"the disturbed run did not complete{f': {reason}' if reason else ''}")
    fired = {kill.scheduled for kill in disturbed.kills if kill.pid is not None}
    missing = [f"--kill {kill}" for kill in disturbance.scheduled if str(kill) not in fired]
    missing += [f"--kill-host {kill}" for kill in disturbance.hosts if str(kill) not in fired]
    if missing:
        found.append(f"never happened: {', '.join(missing)}")
    wanted = disturbance.random
    if wanted is not None and len(disturbed.kills) < (wanted.count or 1):
        found.append(
            f"{len(disturbed.kills)} of {counted(wanted.count, 'kill')} happened "
            "before the run was over"
            if wanted.count
            else f"the run was over before any rank was killed (mean gap {wanted.mtbf_seconds:g} s)"
        )
    first, second = undisturbed.summary.get("model_sha256"), disturbed.summary.get("model_sha256")
    if (
        undisturbed.completed
        and disturbed.completed
        and first != second
        and promises_the_same_model(disturbed)
    ):
        found.append(f"model_sha256 NOT EQUAL: undisturbed {first}, disturbed {second}")
    for name, run in (("undisturbed", undisturbed), ("disturbed", disturbed)):
        wrong = (run.summary.get("parity") or {}).get("mismatches", 0)
        if wrong:
            found.append(f"{counted(wrong, 'stripe')} of the {name} run: wrong parity at the end")
    return found


def _notes(undisturbed: RunRecord, disturbed: RunRecord) -> list[str]:
    notes = []
    for name, run in (("undisturbed", undisturbed), ("disturbed", disturbed)):
        if run.unwritten_steps:
            notes.append(
                f"the times of {run.unwritten_steps} of {run.last_step} steps of the {name} run "
                "died with the rank that reports; they are counted between the steps around them"
            )
        if run.damaged_lines:
            notes.append(
                f"{run.damaged_lines} lines of the {name} run's events.jsonl are damaged "
                "and were left out"
            )
    notes += [
        f"laid out anew over {counted(reshape.servers, 'server')} (k={reshape.k} m={reshape.m}) "
        f"before step {reshape.step}: training waited {reshape.seconds:.2f} s, "
        f"{reshape.moved_bytes:,} bytes were moved"
        for reshape in disturbed.reshapes
    ]
    spares = [*undisturbed.unused_spares.values()]
    if spares:
        notes.append(
            f"unused spares of the undisturbed run: {len(spares)}, with {min(spares) / 1e6:.0f} "
            f"to {max(spares) / 1e6:.0f} MB of anonymous memory each, also of shared libraries"
        )
    noticed = {rank for failure in disturbed.failures for rank in failure.ranks}
    late = [kill.rank for kill in disturbed.kills if kill.rank not in noticed]
    if late and disturbed.completed:
        notes.append(
            "killed as the run ended, when nobody had to notice any more: "
            f"{', '.join(map(str, late))}"
        )
    waited = [kill for kill in disturbed.kills if kill.waited_seconds >= 0.1]
    if waited:
        notes.append(
            f"{len(waited)} of {len(disturbed.kills)} kills were put off "
            "until one more could be survived, "
            f"by {max(kill.waited_seconds for kill in waited):.1f} s at most"
        )
    return notes


def _noise(paces: dict[str, Pace]) -> list[str]:
    """A note on noise: up to the first failure both runs are equal, so the machine differs."""
    whole, before = paces["undisturbed"].steps_per_second, paces["before"].steps_per_second
    if (
        not whole
        or before is None
        or paces["before"].steps < JUDGED_STEPS
        or abs(before / whole - 1) < NOISE
    ):
        return []
    return [
        f"nothing had failed yet when the disturbed run was {before / whole:.2f} times as fast as "
        "the undisturbed one: this machine was not quiet, and ratios are no more exact than that"
    ]


def to_dict(report: Report) -> dict[str, Any]:
    """All numbers of a report as plain JSON types; times in seconds, `time` since the epoch."""
    first, second = report.hashes
    return {
        "config": report.name,
        "disturbance": str(report.disturbance),
        "exit_code": 1 if report.problems else 0,
        "problems": list(report.problems),
        "notes": list(report.notes),
        "model_sha256_equal": report.equal,
        "model_sha256_promised_equal": report.exact,
        "eval_auc_difference": report.difference("eval_auc"),
        "eval_logloss_difference": report.difference("eval_logloss"),
        "restored": report.disturbed.summary.get("restored", []),
        "undisturbed": {**_run_dict(report.undisturbed), "model_sha256": first},
        "disturbed": {**_run_dict(report.disturbed), "model_sha256": second},
        "failures": [
            {
                **asdict(failure),
                "killed_seconds": report.since_start(failure.killed_at),
                "noticed_seconds": report.since_start(failure.noticed_at),
                "whole_seconds": report.since_start(failure.whole_at),
            }
            for failure in report.disturbed.failures
        ],
        "reshapes": [
            {**asdict(reshape), "since_start": report.since_start(reshape.time)}
            for reshape in report.disturbed.reshapes
        ],
        "kills": [
            {**asdict(kill), "seconds": report.since_start(kill.time)}
            for kill in report.disturbed.kills
        ],
        "throughput": {
            name: {**asdict(found), "ratio": report.ratio(name)}
            for name, found in report.paces.items()
        },
        "timeline": asdict(report.line),
    }


def _run_dict(run: RunRecord) -> dict[str, Any]:
    kept = (
        "steps",
        "samples",
        "training_seconds",
        "eval_auc",
        "eval_logloss",
        "step_seconds",
        "failures_left",
        "parity",
    )
    return {
        "completed": run.completed,
        "started_at": run.started_at,
        **{name: run.summary.get(name) for name in kept},
        "unwritten_steps": run.unwritten_steps,
        "damaged_lines": run.damaged_lines,
        "unused_spares_bytes": run.unused_spares,
    }

"""Real runs: `ecrm launch` under mpirun, real SIGKILL, and what the run folder says afterwards."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecrm.engine.events import check_event
from ecrm.launch.supervise import session_base
from ecrm.process.linux import session_members
from ecrm.process.neighbours import PidNotes
from ecrm.run.files import check_summary, undescribed

RUN_SECONDS = 300
"""After which a run counts as hanging, on a machine that may have other work."""

BASE = {"train.steps": 40, "train.slots": 2, "model.dense_arch": "native"}
"""What all drills of the tiny config train, whatever is killed: their models are equal."""

CHECKPOINTS = {**BASE, "checkpoint.every_steps": 3}

REBUILT_AT_ONCE = {"protection.rebuild_share": 1, "protection.rebuild_rows_per_step": 100_000}
"""A lost shard is whole before the next death, however slow the machine is."""

LONG = {"train.steps": 400, "model.dense_arch": "native", "protection.verify_parity_at_end": "true"}
"""What runs train that something is done to from outside."""


OF_TRAINING = {
    "event",
    "step",
    "committed",
    "samples",
    "skipped",
    "logged",
    "window",
    "values",
}
"""Fields of events that are about the training, and not about times or the cluster."""


@dataclass(frozen=True)
class Run:
    """A finished `ecrm launch`: exit code, what it printed, and its run folder."""

    code: int
    output: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json; it and all files beside it are as ecrm/run/files.py says."""
        path = self.folder / "summary.json"
        assert path.exists(), f"no summary.json:\n{self.output}"
        summary = json.loads(path.read_text())
        check_summary(summary)
        assert undescribed(self.folder) == [], "see ecrm/run/files.py"
        return summary

    @property
    def model(self) -> str:
        return self.summary["model_sha256"]

    @property
    def progress(self) -> list[dict[str, Any]]:
        """What progress and evaluations tell of the training: the same whoever dies."""
        kinds = ("progress", "evaluation")
        told = [event for event in self.events if event["event"] in kinds]
        return [{key: event[key] for key in event.keys() & OF_TRAINING} for event in told]

    @property
    def events(self) -> list[dict[str, Any]]:
        """All lines of events.jsonl, each as ecrm/engine/events.py says, or ValueError."""
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        for event in events:
            check_event(event)
        return events

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return json.loads((self.folder / "ranks.json").read_text())["ranks"]

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def launch_words(
    folder: Path,
    data: Path,
    sets: dict[str, Any] | None = None,
    kills: tuple[str, ...] = (),
    config: str = "tiny",
    program: Sequence[str] = ("-m", "ecrm"),
) -> list[str]:
    """The words of an `ecrm launch`, by `program` in its place."""
    words = [
        sys.executable,
        *program,
        "launch",
        config,
        "--run-dir",
        str(folder),
        "--set",
        f"data.path={data}",
    ]
    for key, value in (sets or {}).items():
        words += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    for kill in kills:
        words += ["--kill", kill]
    return words


def mpirun_line(
    folder: Path,
    data: Path,
    sets: dict[str, Any] | None = None,
    kills: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
) -> list[str]:
    """The mpirun line that `ecrm launch` prints, to be run as it is."""
    done = subprocess.run(
        [*launch_words(folder, data, sets, kills), *more, "--dry-run"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout, comments=True)


def environ_of(pid: int) -> dict[str, str]:
    """The variables with which a process began; those of a forked rank are of its host's server."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(word).split("=", 1) for word in words if b"=" in word)


def guard_of(rank: int) -> int:
    """The guard of a rank, by their pids."""
    notes = PidNotes(environ_of(rank)).notes().values()
    return next(note.pid for note in notes if note.rank == rank)


class Mpirun:
    """A line of mpirun, started and not waited for; nobody but mpirun looks after its ranks."""

    DYING_SECONDS = 3.0  # mpirun does not wait for the children of what it has killed

    def __init__(self, line: list[str]) -> None:
        self._base = session_base()
        self.process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **self._base.__enter__()},
        )

    @property
    def members(self) -> list[int]:
        """All processes of the run."""
        return session_members(self.process.pid)

    def end(self, seconds: float) -> tuple[int, str]:
        """mpirun's exit code and output, within `seconds`; nothing of the run may be left."""
        try:
            output, _ = self.process.communicate(timeout=seconds)
        finally:
            deadline = time.monotonic() + self.DYING_SECONDS
            while (
                (left := self.members)
                and time.monotonic() < deadline
                and self.process.returncode is not None
            ):
                time.sleep(0.05)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
            self._base.__exit__(None, None, None)
        assert left == [], f"left: {left}\n{output}"
        return self.process.returncode, output


def launch(
    folder: Path,
    data: Path,
    sets: dict[str, Any] | None = None,
    kills: tuple[str, ...] = (),
    config: str = "tiny",
    program: Sequence[str] = ("-m", "ecrm"),
) -> Run:
    """Run to the end, bounded in time; nothing of the run is left alive."""
    words = launch_words(folder, data, sets, kills, config, program)
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(
            f"not finished after {RUN_SECONDS} s: {' '.join(words)}\n{output}"
        ) from None
    return Run(process.returncode, output, folder)


def drill(
    folder: Path,
    data: Path,
    sets: dict[str, Any] | None = None,
    kills: tuple[str, ...] = (),
    program: Sequence[str] = ("-m", "ecrm"),
) -> Run:
    """A run that must complete: all kills fired and were recovered; parity is right at the end."""
    sets = {"protection.verify_parity_at_end": True, **(sets or {})}
    run = launch(folder, data, sets, kills, program=program)
    assert run.code == 0, run.output
    fired = {event["scheduled"] for event in run.events_of("kill")}
    assert fired == {kill if ":" in kill else f"{kill}:input" for kill in kills}, run.output
    dead = {rank for failure in run.summary["failures"] for rank in failure["ranks"]}
    assert dead == {int(kill.partition("@")[0]) for kill in kills}, run.output
    assert run.summary["parity"]["mismatches"] == 0, run.output
    assert run.summary["parity"]["stripes"] > 0 or run.summary["protection"]["m"] == 0, run.output
    return run


def resume(
    folder: Path,
    data: Path,
    given: Path,
    sets: dict[str, Any],
    kills: tuple[str, ...] = (),
    how: str = "--resume",
) -> Run:
    """`ecrm launch --resume`, or `how` else it begins from what is `given`, to its end."""
    words = [*launch_words(folder, data, sets, kills), how, str(given)]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_SECONDS
    )
    return Run(done.returncode, done.stdout, folder)


def kill_everything_once(
    begun: Callable[[], bool],
    wait: float,
    folder: Path,
    data: Path,
    sets: dict[str, Any],
    given: Path | None = None,
) -> None:
    """Start a run, or resume `given`, and SIGKILL all of it `wait` seconds after `begun()`."""
    run = Mpirun(
        mpirun_line(folder, data, sets, more=() if given is None else ("--resume", str(given)))
    )
    deadline = time.monotonic() + RUN_SECONDS
    try:
        while not begun() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(wait)
    finally:
        while members := run.members:
            for pid in members:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        run.end(RUN_SECONDS)
    assert not (folder / "summary.json").exists(), "killed too late"


PF_EXITING = 0x4
"""linux/sched.h"""


def is_running(pid: int) -> bool:
    """Whether a process is there and is not dying, nor a zombie that nobody has collected."""
    state, flags, _ = _state(pid)
    return state != "Z" and not flags & PF_EXITING


def is_dying(pid: int) -> bool:
    """Whether the system is taking back what a process that was killed, or has ended, had."""
    state, flags, _ = _state(pid)
    return state != "Z" and bool(flags & PF_EXITING)


def niceness(pid: int) -> int:
    """By how much a process stands back for others, 0 where there is none."""
    return _state(pid)[2]


def _state(pid: int) -> tuple[str, int, int]:
    """State, flags and niceness of a process (proc_pid_stat(5)); a zombie where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "Z", 0, 0
    return fields[0], int(fields[6]), int(fields[16])


PHASES = ("input", "lookup", "forward", "backward", "update", "parity", "dense", "commit")


def kill_one_by_one(ranks, phases, first, apart):
    return tuple(
        f"{rank}@{first + apart * i}:{phase}"
        for i, (rank, phase) in enumerate(zip(ranks, phases, strict=True))
    )


STATELESS = {
    **BASE,
    "protection.name": "stateless",
    "checkpoint.every_steps": 5,
    "protection.rebuild_rows_per_step": 200,
}

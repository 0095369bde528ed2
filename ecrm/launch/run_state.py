"""The state of a run, read from the run folder by a process outside of the run.

Reads files alone, and takes no lock. Imports no torch.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ecrm.base.errors import STOPPED_EXIT_CODE, ParityMismatch, UsageError
from ecrm.base.wording import counted, duration, measured, survives_in_words
from ecrm.process.linux import anonymous_bytes, began_at
from ecrm.run.reading import Event, parse_events, read_json
from ecrm.run.run_lock import is_held
from ecrm.run.run_status import RunStatus
from ecrm.run.session_folders import last_summary, session_folders

ALIVE = ("starting", "training", "finishing")
"""The states of a run with living ranks."""
DIED_EXIT_CODE = 1
CLOCK_SECONDS = 2.0
"""The most seconds by which a process may seem younger than a file written by the process."""
MB = 1e6


@dataclass(frozen=True)
class RankState:
    """A rank as found in ranks.json, and as a process of this host.

    - `role`: the work of the rank in words, such as "server" or "trainer".
    - `state`: `alive`, `rebuilding`, `dead`, `gone` for a missing process, or `ended` for a rank of
      a run without living ranks. The state of a rank on a remote host comes from ranks.json.
    - `memory_bytes`: anonymous memory, `None` for a missing process and on a remote host.
    """

    rank: int
    role: str
    host: str
    pid: int
    state: str
    memory_bytes: int | None


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    - `state`: a word of ALIVE, `complete`, `stopped`, `failed`, `rejected`, or `died` for a run
      that ended without a word.
    - `exit_code`: 0 for a living or complete run, else the exit code of the run's launch.
    - `why`: the reason for an end other than `complete`, else "".
    - `steps`: 0 if not known yet. `failures_left`: `None` once the run has ended.
    - `told_seconds`: the age of the last event, `None` without an event.
    """

    state: str
    exit_code: int
    why: str
    step: int
    steps: int
    samples_per_second: float | None
    steps_per_second: float | None
    seconds_left: float | None
    logged: Mapping[str, float | None]
    failures: int
    failures_left: int | None
    rebuilding: Sequence[int]
    rebuilt: float
    told_seconds: float | None
    ranks: Sequence[RankState]

    @property
    def alive(self) -> bool:
        """Whether the run has living ranks."""
        return self.state in ALIVE


def run_state(run_dir: Path, now: float | None = None, session: int | None = None) -> RunState:
    """The state of the run in `run_dir`; `now` is in seconds since the epoch.

    A script's run with several sessions is judged by `session`, by default its newest session. An
    earlier session is complete, since a later session has begun. Raises UsageError for a folder
    without a run.
    """
    now = time.time() if now is None else now
    folders = session_folders(run_dir)
    events = [_events(folder) for folder in folders]
    held = is_held(run_dir)
    if not held and not events[0] and not any((run_dir / name).exists() for name in ENDINGS):
        raise UsageError(
            f"{run_dir}: holds no run; name the folder given as --run-dir, or printed at the start"
        )
    number = max((at for at, told in enumerate(events) if told), default=0)
    earlier = session is not None and session <= number
    if session is not None and earlier:
        number = session - 1
    told, standing = events[number], RunStatus(0)
    standing.take(told)
    state, code, why = ("complete", 0, "") if earlier else _judge(folders, held, standing)
    going = state == "training"
    return RunState(
        state=state,
        exit_code=code,
        why=why,
        step=standing.step,
        steps=standing.steps,
        samples_per_second=standing.samples_per_second,
        steps_per_second=standing.steps_per_second,
        seconds_left=standing.seconds_left(now) if going and standing.steps else None,
        logged=standing.logged,
        failures=standing.failures,
        failures_left=standing.failures_left if state in ALIVE else None,
        rebuilding=sorted(standing.rebuilding) if state in ALIVE else (),
        rebuilt=standing.rebuilt,
        told_seconds=now - told[-1]["time"] if told else None,
        ranks=rank_states(folders[number] / "ranks.json", standing.rebuilding, state),
    )


ENDINGS = ("summary.json", "stopped.json", "failure.json", "rejected.json")


def _events(folder: Path) -> list[Event]:
    try:
        return parse_events((folder / "events.jsonl").read_text(errors="replace"))[0]
    except OSError:
        return []


def _judge(folders: Sequence[Path], held: bool, standing: RunStatus) -> tuple[str, int, str]:
    """(state, exit code, reason) from the last files of a run."""
    if failure := read_json(folders[0] / "failure.json"):
        code = int(failure.get("exit_code") or 1)
        return "failed", code, str(failure.get("message", ""))
    if held:  # a script's complete session may be followed by the next one
        going = standing.started and not (standing.steps and standing.finishing)
        return "training" if going else "finishing" if standing.started else "starting", 0, ""
    if last_summary([read_json(each / "summary.json") for each in folders]).get("completed"):
        return "complete", 0, ""
    if any((each / "rejected.json").exists() for each in folders):
        return "rejected", ParityMismatch.exit_code, "the parity held did not match the rows"
    for each in folders[::-1]:
        if stopped := read_json(each / "stopped.json"):
            return "stopped", STOPPED_EXIT_CODE, f"stopped by {stopped.get('signal', 'a signal')}"
    return "died", DIED_EXIT_CODE, "all ranks ended without a word, as after a power cut"


def rank_states(file: Path, rebuilding: Set[int], state: str) -> list[RankState]:
    """The ranks in `file`, a ranks.json, of a run in `state`; empty without the file.

    `rebuilding` are the shards not whole yet.
    """
    try:
        written = file.stat().st_mtime
    except OSError:
        return []
    found = []
    for entry in read_json(file).get("ranks", []):
        host, pid, memory = str(entry.get("host", "?")), int(entry.get("pid", 0)), None
        if not entry.get("live"):
            how = "dead"
        elif state not in ALIVE:
            how = "ended"
        else:
            how = "rebuilding" if rebuilding & set(entry.get("shards", ())) else "alive"
            if host == socket.gethostname():
                began = began_at(pid)
                if began is None or began > written + CLOCK_SECONDS:  # a reused pid is younger
                    how = "gone"
                else:
                    memory = anonymous_bytes(pid)
        found.append(RankState(int(entry["rank"]), _role(entry), host, pid, how, memory))
    return found


def _role(entry: Mapping[str, Any]) -> str:
    if not entry.get("live"):
        return "-"
    roles = [("shards", "server"), ("slots", "trainer")]
    words = [word for name, word in roles if entry.get(name)]
    if not words and entry.get("dense"):
        words = ["dense copy"]
    return " and ".join(words) or "spare"


def as_json(state: RunState) -> str:
    """The state as JSON text; the fields are those of RunState."""
    return json.dumps(asdict(state), indent=1)


def as_text(state: RunState) -> str:
    """The state as lines for a terminal."""
    steps = f" of {state.steps:,}" if state.steps else ""
    lines = [f"state     {state.state}{f': {state.why}' if state.why else ''}"]
    if state.state != "starting":
        left = f", {duration(state.seconds_left)} left" if state.seconds_left is not None else ""
        lines.append(f"step      {state.step:,}{steps}{left}")
    if state.samples_per_second is not None:
        lines.append(f"pace      {state.samples_per_second:,.0f} samples/s")
    elif state.steps_per_second is not None:
        lines.append(f"pace      {state.steps_per_second:,.1f} steps/s")
    if state.logged:
        values = "  ".join(f"{name} {measured(value)}" for name, value in state.logged.items())
        lines.append(f"logged    {values}")
    survives = ""
    if state.failures_left is not None:
        survives = f", {survives_in_words(state.failures_left)}"
    lines.append(f"survived  {counted(state.failures, 'failure')}{survives}")
    if state.rebuilding:
        shards = ", ".join(map(str, state.rebuilding))
        lines.append(f"rebuild   shards {shards}: {state.rebuilt:.0%}")
    if state.told_seconds is not None:
        lines.append(f"told      {duration(max(state.told_seconds, 0))} ago")
    if state.ranks:
        lines += ["", *rank_table(state.ranks)]
    return "\n".join(lines)


def rank_table(ranks: Sequence[RankState], narrow: bool = False) -> list[str]:
    """A header, and a line for each rank; a `narrow` table has no hosts and no pids."""
    rows = [("rank", "role", "host", "pid", "state", "memory")]
    for each in ranks:
        memory = "-" if each.memory_bytes is None else f"{each.memory_bytes / MB:,.0f} MB"
        rows.append((str(each.rank), each.role, each.host, str(each.pid), each.state, memory))
    columns = (0, 1, 4, 5) if narrow else range(len(rows[0]))
    widths = {column: max(len(row[column]) for row in rows) for column in columns}
    right = (0, 3, 5)
    return [
        "  ".join(
            row[column].rjust(width) if column in right else row[column].ljust(width)
            for column, width in widths.items()
        ).rstrip()
        for row in rows
    ]

"""`--resume auto`: the same command line for every start of a run.

The command starts the run, continues the run in its folder, or does nothing for a complete run.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecrm.base.epoch_drafts import left_in
from ecrm.base.errors import UsageError
from ecrm.base.wording import counted
from ecrm.checkpoint.compatibility import FLOAT32, VERSIONS, WIRE, identity
from ecrm.checkpoint.disk import Disk
from ecrm.checkpoint.folder import FOLDER as CHECKPOINTS
from ecrm.checkpoint.folder import CheckpointFolder, find
from ecrm.checkpoint.mapped_folder import files_at
from ecrm.config.schema import Config
from ecrm.run.reading import Event, EventTail, end_of_lines, read_json
from ecrm.run.run_lock import LOCK, is_empty, refuse_if_held
from ecrm.run.session_folders import last_summary, session_folders

AUTO_RESUME = Path("auto")
"""The value of --resume in place of a folder."""
EVENTS = "events.jsonl"
_DRAFTS = (".*.json", ".*.json.*", ".probe.*")
_ENDINGS = {"stopped.json": "stopped", "failure.json": "failed"}


@dataclass(frozen=True)
class Found:
    """The result of `look`.

    `resume` is the folder to go on from, `None` for a new run. `complete`: no work is left.
    """

    resume: Path | None = None
    complete: bool = False


def look(run_dir: Path | None, resume: Path | None, mine: bool = False) -> Found:
    """Find the folder for a run in `run_dir` to go on from; `resume` itself if not AUTO_RESUME.

    `mine`: this process holds the folder. Raises UsageError if `auto` must not touch the folder.
    """
    if resume != AUTO_RESUME:
        return Found(resume)
    if run_dir is None:
        raise UsageError(
            "--resume auto goes on in the run's own folder, which is not named: type --run-dir DIR"
        )
    try:
        return _look(run_dir, mine)
    except OSError as error:
        raise UsageError(f"--run-dir {run_dir}: {error.strerror}; name another folder") from None


def _look(run_dir: Path, mine: bool) -> Found:
    if not mine:
        refuse_if_held(run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise UsageError(f"--run-dir {run_dir}: not a folder; name another one")
    if is_empty(run_dir):
        return Found()
    starts = [event for event in events_of(run_dir) if event.get("event") == "start"]
    # a rank holding the lock must not open the file again; its own run is written in the file
    if not starts and not mine and not read_json(run_dir / LOCK).get("run"):
        raise UsageError(
            f"--run-dir {run_dir}: neither empty nor the folder of a run; name another folder"
        )
    if (run_dir / "rejected.json").exists():
        raise UsageError(
            f"--run-dir {run_dir}: holds a run whose parity did not match at its end; "
            "start again in another folder"
        )
    # a script is through once its last session is
    summaries = [read_json(folder / "summary.json") for folder in session_folders(run_dir)]
    return Found(gone_on_from(run_dir), last_summary(summaries).get("completed") is True)


def complete_in_words(run_dir: Path) -> str:
    """The complete run in `run_dir` in a line, with the options that train more steps."""
    folders = session_folders(run_dir)
    summary = last_summary([read_json(folder / "summary.json") for folder in folders])
    steps, sessions = summary.get("steps"), int(summary.get("sessions") or 1)
    of = f" of {counted(sessions, 'session')}" if sessions > 1 else ""
    if not of and isinstance(steps, int):
        of = f" of {counted(steps, 'step')}"
    said = f"{run_dir} holds the complete run{of}: nothing is left to do"
    if ended := summary.get("ended_early"):
        wanted, why = ended.get("steps_wanted"), ended.get("why")
        return f"{said}; training ended before step {wanted}: {why}"
    if gone_on_from(run_dir) != run_dir:
        return said
    return f"{said}; to train more steps, type --resume {run_dir} --run-dir NEW"


def gone_on_from(run_dir: Path) -> Path | None:
    """The folder for a run in `run_dir` to go on from with AUTO_RESUME; `None` to begin at step 0.

    Without own checkpoints or mapped files, a run goes on from the source of its first start.
    """
    if find(run_dir / CHECKPOINTS)[0] or files_at(run_dir) is not None:
        return run_dir
    starts = [event for event in events_of(run_dir) if event.get("event") == "start"]
    begun_from = starts[0].get("resumed", {}).get("from") if starts else None
    return Path(begun_from) if begun_from else None


def check_same(run_dir: Path, mine: dict[str, Any]) -> None:
    """Raise UsageError unless the run in `run_dir` is `mine`, a result of `about`.

    A run without a start event passes.
    """
    starts = [
        event for event in events_of(run_dir) if event.get("event") == "start" and "run" in event
    ]
    if not starts:
        return
    # an identity of float32 has no such key
    said = {WIRE: FLOAT32, **starts[0]["run"]}
    now = {WIRE: FLOAT32, **json.loads(json.dumps(mine))}
    other = sorted(
        (name for name in now if said.get(name) != now[name]),
        key=lambda name: ("." not in name, name),
    )
    if other:
        name = other[0]
        if loaded := _begun_otherwise(said.get(name), now[name]):
            raise UsageError(
                f"--run-dir {run_dir}: holds a run whose {name} {loaded} began with other rows: "
                "put the file that it has loaded back under its name, or begin anew in a new folder"
            )
        before, here = (
            ("other ones", "these") if name in ("tables", "data") else (said.get(name), now[name])
        )
        raise UsageError(
            f"--run-dir {run_dir}: holds a run with {name} {before}, here {name} is {here}: "
            f"name a new folder, and type --resume {run_dir} where it shall go on from there"
        )


def _begun_otherwise(before: Any, here: Any) -> str:
    """The first differing table, if only its first values differ; else ""."""
    if not isinstance(before, dict) or not isinstance(here, dict):
        return ""
    for name, table in here.items():
        then = before.get(name)
        if then != table and isinstance(then, dict) and isinstance(table, dict):
            alike = {**then, "begins": None} == {**table, "begins": None}
            return name if alike and then.get("begins") and table.get("begins") else ""
    return ""


def about(config: Config) -> dict[str, Any]:
    """The identity of a run, the same at every start: all settings deciding the model's bits."""
    same = {
        name: value
        for name, value in identity(config).items()
        if name not in ("told", "data_began", VERSIONS)
    }
    return {**same, "train.steps": config.train.steps, "train.epochs": config.train.epochs}


def tidy(run_dir: Path) -> str:
    """Remove half-written files of an ended life, and the file about its end.

    Also removes rejected.json, ranks.json and trace.json. Returns the kind of end: stopped, failed,
    or killed.
    """
    ended = [word for name, word in _ENDINGS.items() if (run_dir / name).exists()]
    for pattern in (*_DRAFTS, *_ENDINGS, "rejected.json", "ranks.json", "trace.json"):
        for path in run_dir.glob(pattern):
            path.unlink()
    for drafts in left_in(run_dir):
        shutil.rmtree(drafts)
    with contextlib.suppress(FileNotFoundError), open(run_dir / EVENTS, "r+b") as file:
        file.truncate(end_of_lines(file))  # a power cut tears the last line
    CheckpointFolder(run_dir / CHECKPOINTS, Disk()).tidy()
    return ended[0] if ended else "killed"


def events_of(run_dir: Path) -> Iterator[Event]:
    """The events in events.jsonl; incomplete lines are left out."""
    return EventTail(run_dir / EVENTS).new_events()


def lives_of(events: Iterable[dict[str, Any]], ended: str) -> list[dict[str, Any]]:
    """The lives of a run, from its events, in order.

    The fields of a life: the time it `began`, its first step, the last step seen, the number of
    failures, and how the life `ended`; `ended` is given for the last life.
    """
    lives: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "start":
            if lives:
                lives[-1]["ended"] = event.get("before", "killed")
            step = event.get("resumed", {}).get("step", 0)
            lives.append(
                {
                    "began": event["time"],
                    "from_step": step,
                    "seen_step": step,
                    "failures": 0,
                    "ended": ended,
                }
            )
        elif lives:
            lives[-1]["seen_step"] = max(lives[-1]["seen_step"], event.get("step", 0))
            lives[-1]["failures"] += event["event"] == "failure"
    return lives

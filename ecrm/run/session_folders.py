"""The folders of a script's sessions: the run folder for the first, session-N in it for the others.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ecrm.base.errors import UsageError
from ecrm.base.wording import counted
from ecrm.run.reading import read_own

ENDED_BADLY = ("stopped.json", "failure.json")
_NAME = "session-{}"


def session_folder(run_dir: Path, number: int) -> Path:
    """The folder of a script's session, the first being number 1."""
    return run_dir if number == 1 else run_dir / _NAME.format(number)


def session_folders(run_dir: Path) -> list[Path]:
    """The folders of all sessions that have begun, or are about to begin, in order."""
    folders = [session_folder(run_dir, 1)]
    while (following := session_folder(run_dir, len(folders) + 1)).is_dir():
        folders.append(following)
    return folders


def newest_session(run_dir: Path) -> Path:
    """The folder of the last session that has begun, or that is about to begin."""
    return session_folders(run_dir)[-1]


def told_session(run_dir: Path, number: int | None = None) -> Path:
    """The folder of session `number`, by default the folder of the newest session with an event.

    Raises UsageError for a session that the run lacks.
    """
    folders = session_folders(run_dir)
    if number is None:
        return next((each for each in folders[::-1] if _has_event(each)), folders[-1])
    if not 1 <= number <= len(folders):
        raise UsageError(
            f"--session {number}: {run_dir} has {counted(len(folders), 'session')}; "
            f"type --session {len(folders)}"
        )
    return folders[number - 1]


def has_ended(run_dir: Path, launch: str | None) -> bool:
    """Whether the files of a run say that the launch has ended, well or not."""
    sessions = session_folders(run_dir)
    if last_summary([read_own(each / "summary.json", launch) for each in sessions]):
        return True
    return any(read_own(each / name, launch) for each in sessions for name in ENDED_BADLY)


def _has_event(folder: Path) -> bool:
    try:
        with open(folder / "events.jsonl", "rb") as events:
            return events.readline().endswith(b"\n")
    except OSError:
        return False


def last_summary(summaries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The summary of a script's last session, from those of all folders, {} where none is written.

    A script may end before a session of an earlier start: the last summary has the field
    `sessions`, the number of the script's sessions.
    """
    for number, summary in enumerate(summaries, 1):
        if summary.get("sessions") == number:
            return summary
    return summaries[-1]

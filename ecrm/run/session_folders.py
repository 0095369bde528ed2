"""The folders of a script's sessions: the run folder for the first, session-N in it for the others.

Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

_NAME = "session-{}"


def session_folder(run_dir: Path, number: int) -> Path:
    """The folder of a script's session, the first being number 1."""
    return run_dir if number == 1 else run_dir / _NAME.format(number)


def newest_session(run_dir: Path) -> Path:
    """The folder of the last session that has begun, or that is about to begin."""
    number = 1
    while session_folder(run_dir, number + 1).is_dir():
        number += 1
    return session_folder(run_dir, number)

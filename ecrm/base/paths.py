"""Paths as typed by people."""

from __future__ import annotations

from pathlib import Path

from ecrm.base.errors import UsageError


def typed_path(text: str | Path) -> Path:
    """The path typed by a person, with ~ and ~NAME replaced by the home folder.

    A shell leaves ~ unchanged after an equals sign, and in a config. Raises UsageError if the home
    folder is unknown.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{text}: there is no such home folder; type the whole path") from None


def typed_path_text(text: str) -> str:
    """The typed path as text; only text beginning with ~ changes."""
    return str(typed_path(text)) if text.startswith("~") else text

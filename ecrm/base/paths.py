"""Paths as people type them."""

from __future__ import annotations

from pathlib import Path

from ecrm.errors import UsageError


def typed_path(text: str | Path) -> Path:
    """The path that a person has typed, ~ and ~NAME replaced by the home folder.

    A shell leaves ~ as it is after an equals sign, and in a config. Raises UsageError where there
    is no such home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{text}: there is no such home folder; type the whole path") from None


def typed_path_text(text: str) -> str:
    """The same, as text."""
    return str(typed_path(text)) if text.startswith("~") else text

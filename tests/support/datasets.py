"""Generated datasets."""

from __future__ import annotations

from pathlib import Path

from support.commands import ecrm


def prepared(folder: Path, rows: int, seed: int) -> Path:
    """A dataset of generated Criteo rows."""
    text, data = folder / "rows.txt", folder / "data"
    for words in (
        ["generate", "criteo", "--rows", str(rows), "--seed", str(seed), "--output", str(text)],
        ["prepare", "criteo", str(text), "--output", str(data)],
    ):
        done = ecrm(*words, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    return data

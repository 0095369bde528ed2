"""Steps that processes tell of while they run, each in a file of its own."""

from __future__ import annotations

import json
import statistics
from pathlib import Path


class ToldSteps:
    """The file of one process in a folder: a line [seconds since the epoch, loss] for each step."""

    def __init__(self, folder: Path, process: int = 0) -> None:
        self._folder, self._path = folder, folder / f"{process}.jsonl"

    def append(self, seconds: float, loss: float) -> None:
        """Tell that one more step is finished."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps([seconds, loss]) + "\n")

    def finished(self) -> list[tuple[int, float]]:
        """(step, seconds since the epoch) of every step that this process has told of."""
        return [(step, seconds) for step, (seconds, _) in enumerate(_lines(self._path), 1)]

    def first_loss(self, steps: int) -> float:
        """The mean loss of the first steps, over the processes of the folder."""
        files = self._folder.glob("*.jsonl")
        return statistics.mean(loss for path in files for _, loss in _lines(path)[:steps])


def _lines(path: Path) -> list[tuple[float, float]]:
    """The whole lines of a file that may be growing, or not there yet."""
    text = path.read_text() if path.exists() else ""
    return [tuple(json.loads(line)) for line in text.split("\n")[:-1]]

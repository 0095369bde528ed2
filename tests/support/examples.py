"""The scripts of `examples/` under `ecrm launch`, in a layout of six ranks."""

from __future__ import annotations

from pathlib import Path

from support.commands import ecrm
from support.drilling import Run
from support.paths import ROOT

EXAMPLES = ROOT / "examples"
LAYOUT = ("--servers", "3", "--trainers", "2", "--spares", "1", "-k", "2", "-m", "1")
"""Ranks 0 to 2 are servers, 3 and 4 trainers."""


def run_example(name: str, folder: Path, words: tuple[str, ...], own: tuple[str, ...]) -> Run:
    """`ecrm launch` of an example in a folder: further `words` of it, and the script's `own`."""
    line = ("launch", str(EXAMPLES / name), *LAYOUT, "--run-dir", str(folder / "run"), *words)
    done = ecrm(*line, "--", *own, cwd=folder, timeout=200)
    return Run(done.returncode, done.stdout + done.stderr, folder / "run")


def dead_ranks(run: Run) -> list[int]:
    """The ranks that a run has survived the death of."""
    return sorted(rank for failure in run.summary["failures"] for rank in failure["ranks"])

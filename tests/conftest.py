"""Fixtures shared by tests that run real training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.drilling import BASE, Run, drill


@pytest.fixture(scope="session")
def criteo_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset of generated Criteo rows, prepared once."""
    folder = tmp_path_factory.mktemp("criteo")
    text, data = folder / "rows.txt", folder / "data"
    for words in (
        ["generate", "criteo", "--rows", "12000", "--seed", "1", "--output", str(text)],
        ["prepare", "criteo", str(text), "--output", str(data)],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ecrm", *words], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return data


@pytest.fixture(scope="session")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory, criteo_rows: Path) -> Run:
    """The run of `BASE` in which nothing failed."""
    return drill(tmp_path_factory.mktemp("undisturbed") / "run", criteo_rows, BASE)


@pytest.fixture(scope="session")
def undisturbed(undisturbed_run: Run) -> str:
    """Its model_sha256."""
    return undisturbed_run.model

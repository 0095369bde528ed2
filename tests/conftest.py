"""Fixtures shared by tests that run real training."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecrm.checkpoint.folder import Checkpoint, name_of
from support.benchmarking import BENCHMARKS, program
from support.drilling import BASE, CHECKPOINTS, Run, drill, launch

MARKS = {"unit": "parallel", "simulated": "parallel", "drills": "drill"}
"""Of all tests of a folder; those of tests/mpi have none."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder, before `-m` selects by marks."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in MARKS:
            item.add_marker(MARKS[folder])


def prepared(folder: Path, rows: int, seed: int) -> Path:
    """A dataset of generated Criteo rows."""
    text, data = folder / "rows.txt", folder / "data"
    for words in (
        ["generate", "criteo", "--rows", str(rows), "--seed", str(seed), "--output", str(text)],
        ["prepare", "criteo", str(text), "--output", str(data)],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ecrm", *words], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return data


@pytest.fixture(scope="session")
def criteo_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset of generated Criteo rows, prepared once."""
    return prepared(tmp_path_factory.mktemp("criteo"), rows=12_000, seed=1)


@pytest.fixture(scope="session")
def next_day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other rows for the same tables."""
    return prepared(tmp_path_factory.mktemp("next_day"), rows=6_000, seed=2)


@pytest.fixture(scope="session")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory, criteo_rows: Path) -> Run:
    """The run of `BASE` in which nothing failed."""
    return drill(tmp_path_factory.mktemp("undisturbed") / "run", criteo_rows, BASE)


@pytest.fixture(scope="session")
def undisturbed(undisturbed_run: Run) -> str:
    """Its model_sha256."""
    return undisturbed_run.model


@pytest.fixture(scope="session")
def killed_run(tmp_path_factory: pytest.TempPathFactory, criteo_rows: Path) -> Path:
    """The folder of a run of `CHECKPOINTS` of which every rank has died in step 13."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    run = launch(folder, criteo_rows, CHECKPOINTS, tuple(f"{rank}@13:update" for rank in range(6)))
    assert run.code != 0 and not (folder / "summary.json").exists(), run.output
    assert Checkpoint.open(folder / "checkpoints" / name_of(12)).step == 12
    return folder


@pytest.fixture
def committed_results() -> Iterator[None]:
    """The committed CSV files, which a smoke run may not touch."""

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (BENCHMARKS / "results").iterdir()}

    before = times()
    yield
    assert times() == before


@pytest.fixture
def benchmark_data(criteo_rows: Path, tmp_path: Path) -> Path:
    """The generated data of a smoke run, so that no benchmark makes its own."""
    folder = tmp_path / "kept"
    folder.mkdir()
    for kind in program("lib.measure").DATA:
        (folder / f"{kind}-12000").symlink_to(criteo_rows)
    return folder

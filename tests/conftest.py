"""Fixtures shared by tests that run real training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Before anything imports triton, as TorchRec does: what it is then, it stays.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from support.benchmarking import BENCHMARKS, program
from support.datasets import prepared
from support.drilling import BASE, LONG, Run, drill, launch
from support.gpus import NAMES, Gpu

MARKS = {"unit": "parallel", "simulated": "parallel", "processes": "waiting", "drills": "drill"}
"""Of all tests of a folder; those of tests/mpi have none."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that writes the texts of recoveries anew."""
    parser.addoption("--rewrite-traces", action="store_true", help="write the traces anew")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder, before `-m` selects by marks."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in MARKS:
            item.add_marker(MARKS[folder])


@pytest.fixture(scope="session")
def criteo_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset of generated Criteo rows, prepared once."""
    return prepared(tmp_path_factory.mktemp("criteo"), rows=12_000, seed=1)


@pytest.fixture(scope="session")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory, criteo_rows: Path) -> Run:
    """The run of `BASE` in which nothing failed."""
    return drill(tmp_path_factory.mktemp("undisturbed") / "run", criteo_rows, BASE)


@pytest.fixture(scope="session")
def undisturbed(undisturbed_run: Run) -> str:
    """Its model_sha256."""
    return undisturbed_run.model


@pytest.fixture(scope="session")
def undisturbed_long(tmp_path_factory: pytest.TempPathFactory, criteo_rows: Path) -> str:
    """The model_sha256 of a run of `LONG` in which nothing failed."""
    return launch(tmp_path_factory.mktemp("undisturbed_long") / "run", criteo_rows, LONG).model


@pytest.fixture(params=NAMES)
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """Each GPU that a test can run on: an imitated one, and with -k cuda a real one."""
    gpu = Gpu(request.param)
    if gpu.missing is not None:
        pytest.skip(gpu.missing)
    return gpu


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

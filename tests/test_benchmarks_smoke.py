"""The benchmarks of whole runs, at their smallest size: they run, measure what they say, and give their figures and tables."""

import csv
from pathlib import Path

import pytest
from benchmarking import BENCHMARKS, program

MEASURED_ON = ("device", "cores", "torch", "openmpi", "ecrm_commit")


@pytest.fixture
def results():
    """Times of the committed CSV files; a smoke run may not touch them."""
    before = {path: path.stat().st_mtime_ns for path in (BENCHMARKS / "results").iterdir()}
    yield before
    assert {path: path.stat().st_mtime_ns for path in (BENCHMARKS / "results").iterdir()} == before


@pytest.fixture
def kept(criteo_rows, tmp_path):
    """A folder in which the benchmarks find generated data of their smoke size, so that each need not make its own."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "data-12000").symlink_to(criteo_rows)
    return tmp_path / "kept"


def read(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV, which say what they were measured on; its figure and tables can be made."""
    lines = list(csv.DictReader(path.open()))
    assert all(line[column] for line in lines for column in MEASURED_ON)
    figures, tables = program("figures"), program("tables")
    drawn = path.with_suffix(".png")
    figures.picture(figures.FIGURES[path.stem], path, drawn)
    assert figures.stale(path, drawn) is None
    for name, table in tables.TABLES.items():
        if table.csv == path.name:
            assert "|" in tables.content(name, path.parent) or name.endswith("figure")
    return lines


def test_step(results, kept, tmp_path, capsys):
    pytest.importorskip("torchrec")
    benchmark = program("bench_step")
    target = tmp_path / "step.csv"
    benchmark.main(["--smoke", "--data", str(kept), "--output", str(target)])
    lines = {line["contender"]: line for line in read(target)}
    assert set(lines) == set(benchmark.SMOKE.contenders)
    assert all(float(line["samples_per_second"]) > 0 for line in lines.values())
    # Same batches, initial values, losses and optimizers: protection changes no bit, TorchRec rounds differently.
    losses = {name: float(line["train_logloss"]) for name, line in lines.items()}
    assert losses["erasure"] == losses["none"]
    assert abs(losses["torchrec-planner"] - losses["none"]) < 1e-5
    said = capsys.readouterr().out
    assert "erasure / none: " in said and "erasure / torchrec: " in said


def test_scaling(results, kept, tmp_path):
    program("bench_scaling").main(["--smoke", "--data", str(kept), "--output", str(tmp_path / "scaling.csv")])
    point, killed = read(tmp_path / "scaling.csv")
    assert (point["series"], killed["series"]) == ("servers", "rebuild")
    assert float(point["step_ms"]) > 0 and point["gap_ms"] == ""
    assert float(killed["gap_ms"]) > float(killed["recovery_ms"]) > 0
    assert float(killed["kept_while_rebuilding"]) > 0


def test_checkpoint(results, tmp_path):
    program("bench_checkpoint").main(["--smoke", "--csv", str(tmp_path / "checkpoint.csv")])
    lines = read(tmp_path / "checkpoint.csv")
    assert [line["mode"] for line in lines] == ["sync", "async"]
    assert all(int(line["bytes"]) > 10_000 * 64 * 4 for line in lines)
    assert all(float(line["seconds"]) >= float(line["stall_seconds"]) > 0 for line in lines)


def test_scrub(results, kept, tmp_path):
    benchmark = program("bench_scrub")
    benchmark.main(["--smoke", "--data", str(kept), "--csv", str(tmp_path / "scrub.csv")])
    lines = read(tmp_path / "scrub.csv")
    assert [int(line["rows_per_step"]) for line in lines] == list(benchmark.ROWS_PER_STEP)
    assert [float(line["ratio_to_0"]) > 0 for line in lines] == [True] * len(lines)
    assert all(int(line["rows_checked_per_step"]) > 0 for line in lines[1:])


def test_a_smoke_run_goes_to_a_folder_of_its_own(tmp_path):
    measure = program("measure")
    assert measure.target("x.csv", None, smoke=True).parent != measure.RESULTS
    assert measure.target("x.csv", None, smoke=False) == measure.RESULTS / "x.csv"
    assert measure.target("x.csv", tmp_path / "y.csv", smoke=True) == tmp_path / "y.csv"

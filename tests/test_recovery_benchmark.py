"""The benchmark of recovery runs, at its smallest size, with a real SIGKILL, and writes what it promises."""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "benchmarks" / "bench_recovery.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(SOURCE.parent))
    spec = importlib.util.spec_from_file_location("benchmark_of_recovery", SOURCE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def test_small_run_measures_a_kill(benchmark, tmp_path, capsys):
    benchmark.main(["--smoke", "--csv", str(tmp_path / "recovery.csv")])
    (line,) = csv.DictReader((tmp_path / "recovery.csv").open())
    assert all(line[field] for field in benchmark.FIELDS)
    for field in ("gap_ms", "recovery_ms", "samples_per_second_before", "samples_per_second_during", "samples_per_second_after",
                  "rebuild_seconds", "rebuilt_bytes"):  # fmt: skip
        assert float(line[field]) > 0
    assert line["scenario"] in capsys.readouterr().out


def test_the_table_shows_median_least_and_greatest(benchmark):
    rows = [dict.fromkeys(benchmark.FIELDS, 7) | {"scenario": "server", "gap_ms": gap} for gap in (30.0, 10.0, 2000.0)]
    assert benchmark.table(rows).splitlines()[-1] == "| server | 30 (10 to 2,000) | 7 | 7 | 7 | 7 | 7 | 7 | 7.00 |"

"""The benchmark of recovery runs, at its smallest size, with a real SIGKILL, and writes what it promises."""

from support.benchmarking import program, read


def test_small_run_measures_a_kill(tmp_path, capsys):
    benchmark = program("bench_recovery")
    benchmark.main(["--smoke", "--csv", str(tmp_path / "recovery.csv")])
    (line,) = read(tmp_path / "recovery.csv")
    assert all(line[field] for field in benchmark.FIELDS)
    for field in (
        "gap_ms",
        "recovery_ms",
        "samples_per_second_before",
        "samples_per_second_during",
        "samples_per_second_after",
        "rebuild_seconds",
        "rebuilt_bytes",
    ):
        assert float(line[field]) > 0
    assert line["scenario"] in capsys.readouterr().out

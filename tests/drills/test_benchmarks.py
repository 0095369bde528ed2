"""Benchmarks of whole runs that take long even at their smallest size."""

from support.benchmarking import measured, program


def test_checkpoints_beside_training(committed_results, benchmark_data, tmp_path):
    words = [
        "--smoke",
        "--part",
        "beside",
        "--rounds",
        "1",
        "--regime",
        "dense-heavy",
        "--data",
        str(benchmark_data),
    ]
    program("bench_checkpoint").main([*words, "--runs-csv", str(tmp_path / "checkpoint_runs.csv")])
    lines = measured(tmp_path / "checkpoint_runs.csv")
    assert {line["mode"] for line in lines} == {"sync", "async", "incremental"} and len(lines) == 6
    assert all(
        float(line["stall_ms"]) > 0
        and float(line["durable_seconds"]) > 0
        and int(line["bytes"]) > 0
        for line in lines
    )

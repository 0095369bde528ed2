"""Benchmarks of whole runs that take long even at their smallest size."""

import os

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


def test_oversubscribed(committed_results, benchmark_data, tmp_path):
    benchmark = program("bench_oversubscribed")
    benchmark.main(
        ["--smoke", "--data", str(benchmark_data), "--output", str(tmp_path / "oversubscribed.csv")]
    )
    lines = measured(tmp_path / "oversubscribed.csv")
    assert [line["manner"] for line in lines] == list(benchmark.MANNERS)
    assert all(
        float(line["step_ms"]) > 0 and float(line["over_bind_in_turns"]) > 0 for line in lines
    )
    cores = len(os.sched_getaffinity(0))
    # three ranks, a slot each
    assert {line["auto"] for line in lines} == {
        "" if cores >= 3 else "sleep" if cores == 2 else "bind"
    }


def test_session(committed_results, benchmark_data, tmp_path, capsys):
    benchmark = program("bench_session")
    target = tmp_path / "session.csv"
    benchmark.main(["--smoke", "--data", str(benchmark_data), "--output", str(target)])
    found = {(line["session"], line["contender"]): line for line in measured(target)}
    assert list(found) == [
        ("session", "session"),
        ("session", "torchrec-planner-pipelined"),
        ("session-dot", "session-dot"),
        ("session-dot", "torchrec-planner"),
    ]
    assert all(float(line["samples_per_second"]) > 0 for line in found.values())
    for session, contender in found:
        mine, line = found[session, session], found[session, contender]
        ratio = float(line["session_over_this"])
        assert ratio == 1 if contender == session else 0.05 < ratio < 20
        # Same batches, initial values and optimizers; some only round differently.
        losses = [float(each["first_logloss"]) for each in (mine, line)]
        assert 0.1 < losses[0] < 1 and abs(losses[0] - losses[1]) < 2e-5
    one_id, bags = found["session-dot", "session-dot"], found["session", "session"]
    assert one_id["first_logloss"] != bags["first_logloss"]
    assert "session-dot / torchrec: " in capsys.readouterr().out


def test_dense(committed_results, benchmark_data, tmp_path):
    """A dense part that is compiled, or runs in bfloat16: a kill changes no bit."""
    benchmark = program("bench_dense")
    target = tmp_path / "dense.csv"
    benchmark.main(["--smoke", "--data", str(benchmark_data), "--output", str(target)])
    found = {line["manner"]: line for line in measured(target)}
    assert list(found) == list(benchmark.MANNERS)
    for line in found.values():
        assert line["model_sha256"] == line["undisturbed_sha256"]
        assert float(line["gap_ms"]) > 0 and float(line["cpu_ms"]) > 0
        assert 0.01 < float(line["over_float32"]) < 20
    # bfloat16 rounds, and float32 compiled or not is nearly the same
    losses = {manner: float(line["logloss"]) for manner, line in found.items()}
    assert abs(losses["compiled"] - losses["float32"]) < 2e-5
    assert 0 < abs(losses["bfloat16"] - losses["float32"]) < 2e-2
    assert found["bfloat16"]["model_sha256"] != found["float32"]["model_sha256"]


def test_accuracy(committed_results, tmp_path, capsys):
    """All recipes with data on this machine train, and three kills change no bit of a model."""
    benchmark = program("bench_accuracy")
    target = tmp_path / "accuracy.csv"
    benchmark.main(["--smoke", "--output", str(target)])
    lines = measured(target)
    said = capsys.readouterr().out
    recipes = {line["recipe"] for line in lines}
    assert (
        recipes == {name for name, recipe in benchmark.RECIPES.items() if recipe.data.exists()}
        and {"svd", "hstu"} <= recipes
    )
    values = {
        (line["recipe"], line["contender"], line["metric"]): float(line["value"]) for line in lines
    }
    for contender in (benchmark.PLAIN, benchmark.KILLED):
        assert 0.9 < values["svd", contender, "RMSE"] < 1.1  # 1.13 by guessing the mean
    assert {len(line["model_sha256"]) for line in lines} == {0, 64}
    rounded = {line["recipe"] for line in lines if line["contender"] == benchmark.ROUNDED}
    assert "svd" in rounded
    assert 0.9 < values["svd", benchmark.ROUNDED_KILLED, "RMSE"] < 1.1
    shown = {(line["recipe"], line["metric"]) for line in lines}
    assert said.count("| equal to the bit, 1 of 1 |") == len(shown)

"""The benchmark of GPUs where there is none: every kernel is called, and nothing is written."""

import pytest
import torch

from support.benchmarking import program


def test_without_a_gpu_it_ends_with_one_line_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU: torch .* finds none here") as ended:
        program("bench_gpu").main(["--output", str(tmp_path / "gpu.csv")])
    assert str(ended.value).count("\n") == 0 and not list(tmp_path.iterdir())


def test_a_smoke_run_calls_every_kernel(committed_results, monkeypatch, capsys):
    pytest.importorskip("triton")
    benchmark, called = program("bench_gpu"), []
    right = benchmark.interpreted
    monkeypatch.setattr(
        benchmark, "interpreted", lambda case: called.append(case.name) or right(case)
    )
    benchmark.main(["--smoke"])
    words = {name.split()[0].rstrip(",") for name in called}
    assert words >= {"copy", "parity_apply", "decode", "sparse_update", "scatter_add"}
    assert words >= {"gather_records", "scatter_records", "xor_records", "merge_records"}
    assert words >= {"hash_uniform", "begin_rows", "dot_interaction", "unique_by_unit"}
    assert sum(name.startswith("sparse_update") for name in called) == 12
    assert "no peer: " in capsys.readouterr().out


def test_protected_steps_are_compared_with_plain_ones_of_their_round(tmp_path):
    speeds = {"none-0": 2048.0, "erasure-0": 1024.0}
    rows = program("bench_gpu").steps(
        1, lambda folder, sets: {"samples_per_second": speeds[folder.name]}, tmp_path, tmp_path
    )
    found = {row["case"]: (row["median_ms"], row["over_unprotected"]) for row in rows}
    assert found == {"none": ("1000.000", "1.0000"), "erasure": ("2000.000", "2.0000")}


def test_gpu_check_says_that_there_is_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"gpu_check\.py needs an NVIDIA GPU: torch .* finds none"):
        program("gpu_check").main(["--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_failed_part_of_gpu_check_is_told_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    check = program("gpu_check")

    def killed(place):
        raise check.PartFailed("rows on the CPU a, on the GPU b")

    for name in check.PARTS:
        monkeypatch.setitem(check.PARTS, name, lambda place: "well")
    monkeypatch.setitem(check.PARTS, "killed", killed)
    assert check.main(["--output", str(tmp_path), "--imitated"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in told] == [
        [name, "failed" if name == "killed" else "passed"] for name in check.PARTS
    ]
    assert "killed,failed," in (tmp_path / "gpu_check.csv").read_text()
    monkeypatch.setitem(check.PARTS, "killed", lambda place: "well")
    assert check.main(["--output", str(tmp_path), "--imitated", "--part", "killed"]) == 0

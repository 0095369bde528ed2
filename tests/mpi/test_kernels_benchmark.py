"""The benchmark of the kernels runs, at a small size, and writes what it promises."""

import pytest

from support.benchmarking import program, read


def test_small_run_writes_all_columns(tmp_path, capsys):
    # not before test_kernels_triton.py has told Triton, which they import, to interpret
    for package in ("pyeclib", "torchrec", "fbgemm_gpu"):
        pytest.importorskip(package)
    program("bench_kernels").main(["--smoke", "--csv", str(tmp_path / "kernels.csv")])

    lines = read(tmp_path / "kernels.csv")
    contenders = {line["contender"] for line in lines}
    ours = {
        "parity_apply",
        "sparse_update",
        "dot_interaction",
        "decode",
        "gather_records",
        "scatter_add",
    }
    assert contenders == ours | {
        "isa-l contiguous",
        "no-arithmetic",
        "without-delta",
        "merged-after",
        "fbgemm",
        "torchrec",
        "isa-l",
        "torch",
    }
    for line in lines:
        filled = ("device", "instruction_set", "torch", "commit", "counted_bytes", "result_sha256")
        assert all(line[column] for column in filled)
        assert float(line["p20_ms"]) <= float(line["median_ms"]) <= float(line["p80_ms"])
        assert float(line["ours_over_this"]) > 0
    assert "sha256 of the result" in capsys.readouterr().out

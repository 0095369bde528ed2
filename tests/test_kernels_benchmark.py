"""The benchmark of the kernels runs, at a small size, and writes what it promises."""

import pytest
from benchmarking import program, read

pytest.importorskip("pyeclib")


def test_small_run_writes_all_columns(tmp_path, capsys):
    program("bench_kernels").main(["--smoke", "--csv", str(tmp_path / "kernels.csv")])

    lines = read(tmp_path / "kernels.csv")
    contenders = {line["contender"] for line in lines}
    assert {"parity_apply", "isa-l contiguous", "no-arithmetic", "sparse_update", "without-delta"} <= contenders
    for line in lines:
        filled = ("device", "instruction_set", "torch", "commit", "counted_bytes", "result_sha256")
        assert all(line[column] for column in filled)
        assert float(line["p20_ms"]) <= float(line["median_ms"]) <= float(line["p80_ms"])
        assert float(line["ours_over_this"]) > 0
    assert "sha256 of the result" in capsys.readouterr().out

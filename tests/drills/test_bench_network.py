"""The benchmark of placements on hosts with slow links, tiny."""

import pytest

from support.benchmarking import program
from support.imitated_hosts import why_not

REASON = why_not()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_network(tmp_path, capsys):
    target = tmp_path / "network.csv"
    program("bench_network").main(["--smoke", "--csv", str(target), "--ids-per-bag", "20"])
    tables = program("lib.tables")
    by_rows, whole, peer = tables.read_rows(target)
    assert [row["contender"] for row in (by_rows, whole, peer)] == ["rows", "tables", "torchrec"]
    assert all(float(row["step_ms"]) > 0 for row in (by_rows, whole, peer))
    # equal models were asserted by the benchmark; sums travel over the real transport too
    assert float(whole["sent_mb"]) < float(by_rows["sent_mb"])
    assert "ms a step" in capsys.readouterr().out

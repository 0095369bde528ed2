"""One protection is compared with none, with real kills."""

from __future__ import annotations

import csv
from dataclasses import replace

from support.benchmarking import program


def test_one_of_them_is_compared_with_real_kills(tmp_path, capsys, monkeypatch):
    bench = program("bench_protections")
    monkeypatch.setattr(bench, "TINY", replace(bench.TINY, starts=1, evaluated=()))
    bench.main(["--smoke", "--contender", "erasure-k2", "--output", str(tmp_path)])
    with (tmp_path / "protections.csv").open() as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {"none", "erasure-k2"}
    assert all(row["model_sha256"] == row["undisturbed_sha256"] != "" for row in rows.values())
    assert float(rows["erasure-k2"]["lost_ms"]) > 0 and rows["erasure-k2"]["redone_steps"] == "1"
    assert "erasure-k2" in capsys.readouterr().out

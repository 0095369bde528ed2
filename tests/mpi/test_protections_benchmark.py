"""The comparison of protections with real kills, of one protection and of its accuracy."""

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


def test_accuracy_alone_is_measured_anew_also_while_a_shard_is_away(tmp_path, capsys):
    bench = program("bench_protections")
    told = {"regime": "embedding-heavy", "contender": "none", "step_ms": 1.5, "device": "another"}
    bench.measure.write_csv(tmp_path / "protections.csv", [told])
    bench.main(["--smoke", "--accuracy", "--contender", "stateless-30", "--output", str(tmp_path)])
    assert [row["device"] for row in bench.read_rows(tmp_path / "protections.csv")] == [
        "another"
    ], "left as it is"
    rows = bench.read_rows(tmp_path / "protections_accuracy.csv")
    away = {
        name: [int(row["shards_away"]) for row in rows if row["contender"] == name]
        for name in ("none", "stateless-30", "stateless-30 slowly")
    }
    assert [len(found) for found in away.values()] == [4, 4, 4] and away["none"] == [0] * 4
    first, second, _, last = away["stateless-30 slowly"]
    assert (first, second, last) == (0, 1, 0), "the second is made without the shard"
    assert "stateless-30 slowly      final AUC less that of none " in capsys.readouterr().out

"""The comparison of protections at its smallest size, with real kills."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from support.benchmarking import program

contenders = program("lib.contenders")


def test_a_small_comparison_runs_with_real_kills(tmp_path, capsys):
    bench = program("bench_protections")
    bench.main(["--smoke", "--output", str(tmp_path)])
    said = capsys.readouterr().out
    with (tmp_path / "protections.csv").open() as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    assert sorted(rows) == sorted(contenders.SMOKE)
    assert all(row["overhead"] != "" for name, row in rows.items() if name != "none")
    assert all(
        row["model_sha256"] == row["undisturbed_sha256"]
        for name, row in rows.items()
        if name != "stateless-30"
    )
    for name, row in rows.items():
        assert float(row["step_ms"]) > 0
        assert (
            (float(row["lost_ms"]) > 0 and float(row["kept_recovering"]) > 0)
            if name != "none"
            else row["lost_ms"] == ""
        )
    back = {name for name, row in rows.items() if row["rolled_back"] == "True"}
    assert back == {
        "checkpoint-30-sync",
        "checkpoint-30-async",
        "checkpoint-30-incremental",
        "mapped-none",
    }
    assert rows["erasure-k2"]["redone_steps"] == "1"
    with (tmp_path / "protections_bytes.csv").open() as file:
        sizes = {
            row["contender"]: {field: row[field] for field in row} for row in csv.DictReader(file)
        }
    assert len({row["model_sha256"] for row in sizes.values()}) == 1
    assert int(sizes["erasure-k2"]["redundancy_bytes"]) == pytest.approx(
        0.5 * int(sizes["none"]["rows_bytes"]), rel=0.02
    )
    assert (
        int(sizes["erasure-k2"]["sent_bytes_per_step"])
        > int(sizes["none"]["sent_bytes_per_step"])
        > 0
    )
    assert (
        int(sizes["checkpoint-30-sync"]["written_bytes_per_step"]) > 0
        and sizes["none"]["written_bytes_per_step"] == "0"
    )
    assert int(rows["stateless-30"]["lost_steps"]) > 0 and {
        rows[name]["lost_steps"] for name in ("erasure-k2", "chain-2")
    } == {"0"}
    for kind, names in (
        ("accuracy", (*bench.TINY.evaluated, "stateless-30 slowly")),
        ("timeline", [name for name in contenders.SMOKE if contenders.CONTENDERS[name].timeline]),
        ("size", bench.TINY.sized),
    ):
        with (tmp_path / f"protections_{kind}.csv").open() as file:
            assert {row["contender"] for row in csv.DictReader(file)} == set(names)
    assert {row["redone_steps"] for name, row in rows.items() if name == "checkpoint-30-sync"} == {
        str(int(rows["checkpoint-30-sync"]["checkpoint_every_steps"]) // 2 + 1)
    }
    assert "erasure-k2" in said
    figures, tables = program("lib.figures"), program("lib.tables")
    for name in (
        "protections",
        "protections_copies",
        "protections_rebuild",
        "protections_timeline",
        "protections_size",
        "protections_accuracy",
    ):
        figures.picture(
            figures.FIGURES[name], tmp_path / figures.FIGURES[name].csv, tmp_path / f"{name}.png"
        )
    assert tables.content("protections bytes", tmp_path).count("\n| embedding-heavy |") == len(
        contenders.SMOKE
    )
    assert tables.content("protections size", tmp_path).count("\n| ") == 2 * len(bench.TINY.sized)
    assert tables.content("protections accuracy", tmp_path).count("\n| ") == len(
        bench.TINY.evaluated
    )
    assert "| embedding-heavy | chain-2 |" in tables.content("protections short", tmp_path)
    bench.main(["--table", "--output", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[-1] in said


def test_accuracy_alone_is_measured_anew_also_while_a_shard_is_away(tmp_path, capsys):
    bench = program("bench_protections")
    told = {"regime": "embedding-heavy", "contender": "none", "step_ms": 1.5, "device": "another"}
    bench.measure.write_csv(tmp_path / "protections.csv", [told])
    words = ["--smoke", "--part", "accuracy", "--contender", "stateless-30"]
    bench.main([*words, "--output", str(tmp_path)])
    assert [row["device"] for row in bench.read_rows(tmp_path / "protections.csv")] == [
        "another"
    ], "left as it is"
    rows = bench.read_rows(tmp_path / "protections_accuracy.csv")
    away = {
        name: [int(row["shards_away"]) for row in rows if row["contender"] == name]
        for name in ("none", "stateless-30", "stateless-30 slowly")
    }
    assert [len(found) for found in away.values()] == [5, 5, 5] and away["none"] == [0] * 5
    first, second, *_, last = away["stateless-30 slowly"]
    assert (first, second, last) == (0, 1, 0), "the second is made without the shard"
    assert "stateless-30 slowly      final AUC less that of none " in capsys.readouterr().out


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

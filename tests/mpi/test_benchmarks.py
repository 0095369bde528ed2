"""Benchmarks at their smallest size: they measure what they say."""

import json
import os

import numpy as np
import pytest

from support.benchmarking import measured, program, read
from support.paths import ROOT


@pytest.mark.drill
def test_step(committed_results, benchmark_data, tmp_path, capsys):
    pytest.importorskip("torchrec")
    benchmark = program("bench_step")
    target = tmp_path / "step.csv"
    benchmark.main(["--smoke", "--data", str(benchmark_data), "--output", str(target)])
    lines = {line["contender"]: line for line in measured(target)}
    assert set(lines) == set(benchmark.SMOKE.contenders)
    assert all(float(line["samples_per_second"]) > 0 for line in lines.values())
    assert lines["torchrec-planner-pipelined-bound"]["plan"]
    assert (
        0.2 < float(lines["erasure"]["over_none_in_turns"]) < 5
        and float(lines["none"]["over_none_in_turns"]) == 1
    )
    # Same batches, initial values and optimizers; the two only round differently.
    ours, theirs = (
        float(lines[name]["train_logloss"])
        for name in ("erasure", "torchrec-planner-pipelined-bound")
    )
    assert 0.1 < ours < 1 and abs(ours - theirs) < 1e-5
    assert "erasure / torchrec: " in capsys.readouterr().out
    of_phases = measured(tmp_path / "step_phases.csv")
    assert {line["contender"] for line in of_phases} == {"none", "erasure"}
    assert {"lookup", "forward", "backward", "update", "parity", "dense", "commit"} <= {
        line["phase"] for line in of_phases if line["contender"] == "erasure"
    }
    assert all(
        float(line["slowest_rank_ms"])
        >= float(line["mean_ms"])
        >= float(line["in_transport_ms"])
        >= 0
        for line in of_phases
    )


def test_rows_by_zipf_go_to_tables_that_are_all_as_large(tmp_path):
    measure = program("lib.measure")
    data = measure.prepare(tmp_path, 50, measure.ZIPF)
    assert set(json.loads((data / "manifest.json").read_text())["tables"].values()) == {600_000}
    # 0 is a missing value, of which there is none
    assert np.fromfile(data / "sparse.bin", "<i4").all()
    assert measure.REGIME_DATA.keys() == measure.REGIMES.keys()


def test_calls_count_for_the_phase_that_they_lie_in(tmp_path):
    def event(rank, step, name, ts, dur):
        return {
            "ph": "X",
            "pid": rank,
            "name": name,
            "cat": "transport" if "." in name else "phase",
            "ts": ts,
            "dur": dur,
            "args": {"step": step},
        }

    # before the first step that counts
    events = [event(0, 4, "update", 0, 1000), event(0, 4, "transport.exchange", 0, 999)]
    for step in (5, 6):
        at = 10_000 * step
        events += [
            event(0, step, "update", at, 3000),
            event(0, step, "transport.exchange", at, 1000),
            event(0, step, "commit", at + 3000, 500),
        ]
        events += [
            event(1, step, "update", at, 1000),
            event(1, step, "transport.agree", at + 2000, 7000),
        ]
    (tmp_path / "trace.json").write_text(
        json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]})
    )
    assert program("lib.step_phases").phases(tmp_path / "trace.json", 5) == {
        "update": {"mean_ms": 2.0, "slowest_rank_ms": 3.0, "in_transport_ms": 0.5},
        "commit": {"mean_ms": 0.25, "slowest_rank_ms": 0.5, "in_transport_ms": 0.0},
    }


@pytest.mark.drill
def test_scaling(committed_results, benchmark_data, tmp_path):
    for series in ("tables", "servers", "rebuild"):  # the second leaves what the first has written
        program("bench_scaling").main(
            [
                "--smoke",
                "--series",
                series,
                "--data",
                str(benchmark_data),
                "--output",
                str(tmp_path / "scaling.csv"),
            ]
        )
    point, servers, killed = measured(tmp_path / "scaling.csv")
    assert (point["series"], servers["series"], killed["series"]) == (
        "tables",
        "servers",
        "rebuild",
    )
    assert float(point["step_ms"]) > 0 and point["gap_ms"] == "" and killed["rows_per_step"] == ""
    assert float(servers["step_ms"]) > 0 and servers["rows_per_step"] == servers["gap_ms"] == ""
    assert 26 < float(point["rows_per_step"]) <= 64 * 26  # samples of a batch, one id in each table
    assert (
        float(killed["gap_ms"])
        > float(killed["recovery_ms"]) + float(killed["noticing_ms"])
        > float(killed["recovery_ms"])
        > 0
    )
    assert float(killed["kept_while_rebuilding"]) > 0


def test_checkpoint(committed_results, tmp_path):
    program("bench_checkpoint").main(
        ["--smoke", "--part", "alone", "--csv", str(tmp_path / "checkpoint.csv")]
    )
    lines = measured(tmp_path / "checkpoint.csv")
    assert [line["mode"] for line in lines] == ["sync", "async", "torch sync", "torch async"]
    assert all(int(line["bytes"]) > 10_000 * 64 * 4 for line in lines)
    assert all(float(line["seconds"]) >= float(line["stall_seconds"]) > 0 for line in lines)


@pytest.mark.drill
def test_scrub(committed_results, benchmark_data, tmp_path):
    benchmark = program("bench_scrub")
    benchmark.main(["--smoke", "--data", str(benchmark_data), "--csv", str(tmp_path / "scrub.csv")])
    lines = measured(tmp_path / "scrub.csv")
    assert [int(line["rows_per_step"]) for line in lines] == list(benchmark.ROWS_PER_STEP)
    assert [float(line["ratio_to_0"]) > 0 for line in lines] == [True] * len(lines)
    assert all(int(line["rows_checked_per_step"]) > 0 for line in lines[1:])


@pytest.mark.drill
def test_start(committed_results, benchmark_data, tmp_path, capsys):
    program("bench_start").main(
        ["--smoke", "--data", str(benchmark_data), "--csv", str(tmp_path / "start.csv")]
    )
    lines = measured(tmp_path / "start.csv")
    starts = [line for line in lines if line["part"] == "start"]
    assert len(starts) == 4 and {line["contender"] for line in starts} == {
        "one import",
        "own import",
    }
    by_name = {
        name: [line for line in starts if line["contender"] == name]
        for name in ("one import", "own import")
    }
    for forked, own in zip(*by_name.values(), strict=True):
        assert forked["ranks"] == own["ranks"] and float(forked["first_step_seconds"]) > 0
        # ranks that import for themselves share no heap
        assert 2 * int(forked["private_bytes_of_a_rank"]) < int(own["private_bytes_of_a_rank"])
    (memory,) = (line for line in lines if line["part"] == "memory")
    kinds = ("anonymous_bytes", "shared_bytes", "files_bytes")
    assert sum(int(memory[kind]) for kind in kinds) == int(memory["pss_bytes"])
    assert int(memory["data_bytes"]) + int(memory["parity_bytes"]) < int(memory["pss_bytes"])
    assert "in all, by Pss" in capsys.readouterr().out


def test_thousand(committed_results, tmp_path, capsys):
    program("bench_thousand").main(["--smoke", "--csv", str(tmp_path / "thousand.csv")])
    lines = measured(tmp_path / "thousand.csv")
    assert [line["case"] for line in lines] == ["messages", "shard", "ledger", "plan", "digest"] * 2
    assert all(float(line["cpu_ms"]) > 0 and int(line["amount"]) > 0 for line in lines)
    ledger = next(line for line in lines if line["case"] == "ledger")
    assert 19 * 100 < int(ledger["amount"]) < 19 * 1000
    assert "million rows/s | at least 40 million rows/s" in capsys.readouterr().out


def test_prepare(committed_results, tmp_path, capsys):
    target = tmp_path / "prepare.csv"
    program("bench_prepare").main(["--smoke", "--checkout", str(ROOT), "--csv", str(target)])
    lines = measured(target)
    assert "prepare criteo of" in capsys.readouterr().out
    assert {line["threads"] for line in lines} == {"1", str(len(os.sched_getaffinity(0)))}
    by_name = {line["contender"].split(" of ")[0]: line for line in lines}
    assert set(by_name) == {"prepare criteo", "prepare table", "pyarrow alone"}
    assert len({line["data_sha256"] for line in lines if "criteo" in line["contender"]}) == 1
    assert bool(by_name["prepare table"]["data_sha256"]) and int(by_name["prepare table"]["rows"])
    for line in lines:
        assert 0 < float(line["main_thread_share"]) <= 1.01
        free, cpu = (
            float(line[name]) for name in ("rows_per_second_of_free_cores", "rows_per_cpu_second")
        )
        assert 0 < free <= 1.01 * cpu * int(line["threads"])
        assert (line["contender"] != "pyarrow alone") or float(line["cpu_over_floor"]) == 1


def test_a_smoke_run_goes_to_a_folder_of_its_own(tmp_path):
    measure = program("lib.measure")
    assert measure.target("x.csv", None, smoke=True).parent != measure.RESULTS
    assert measure.target("x.csv", None, smoke=False) == measure.RESULTS / "x.csv"
    assert measure.target("x.csv", tmp_path / "y.csv", smoke=True) == tmp_path / "y.csv"


@pytest.mark.drill
def test_recovery(tmp_path, capsys):
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


@pytest.mark.drill
def test_rebuilding(tmp_path, capsys):
    benchmark = program("bench_recovery")
    benchmark.main(["--rebuild", "--smoke", "--csv", str(tmp_path / "rebuild_pace.csv")])
    lines = read(tmp_path / "rebuild_pace.csv")
    assert [line["pace"] for line in lines] == list(benchmark.PACES)
    for line in lines:
        for field in ("seconds_per_gb", "floor_seconds_per_gb", "kept", "rebuilt_bytes"):
            assert float(line[field]) > 0
    assert "| 3 | 2 | 5 % of time |" in capsys.readouterr().out


def test_kernels(tmp_path, capsys):
    for package in ("pyeclib", "torchrec", "fbgemm_gpu"):
        pytest.importorskip(package)
    program("bench_kernels").main(["--smoke", "--csv", str(tmp_path / "kernels.csv")])

    lines = read(tmp_path / "kernels.csv")
    contenders = {line["contender"] for line in lines}
    ours = {
        "parity_apply",
        "sparse_update",
        "dot_interaction",
        "divide",
        "decode",
        "gather_records",
        "scatter_add",
        "row_digest",
        "pieces",
        "bag_sum",
        "segment_sum",
        "unique_with_uses",
        "all of it",
    }
    assert contenders == ours | {
        "isa-l contiguous",
        "no-arithmetic",
        "without-delta",
        "merged-after",
        "two passes",
        "fbgemm",
        "torchrec",
        "isa-l",
        "torch",
        "sha256",
    }
    for line in lines:
        filled = ("device", "instruction_set", "torch", "commit", "counted_bytes", "result_sha256")
        assert all(line[column] for column in filled)
        assert float(line["p20_ms"]) <= float(line["median_ms"]) <= float(line["p80_ms"])
        assert float(line["ours_over_this"]) > 0
    assert "sha256 of the result" in capsys.readouterr().out

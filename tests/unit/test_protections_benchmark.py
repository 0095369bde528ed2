"""The comparison of protections: its arithmetic against cases worked out by hand, and its model."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import pytest

from ecrm.drill.run_record import FailureRecord, KillDone, RunRecord
from support.benchmarking import program

contenders, disturbance, model, versus = (
    program(name) for name in ("lib.contenders", "lib.disturbance", "overhead_model", "lib.versus")
)


def record(finished, killed_at=None, whole_at=None, redone=1, evaluations=()):
    """A run whose steps finished at these (step, second)."""
    failures = ()
    if killed_at is not None:
        failure = FailureRecord(
            (1,),
            5,
            "update",
            killed_at,
            killed_at + 0.01,
            0.25,
            0.5,
            redone,
            (1,),
            1.0,
            whole_at,
            100,
            3,
        )
        failures = (failure,)
    return RunRecord(
        started_at=0.0,
        finished=tuple(finished),
        failures=failures,
        kills=(KillDone(killed_at or 0.0, 1),),
        evaluations=evaluations,
    )


STEADY = [(step, 2.0 * step) for step in range(1, 11)]
"""Ten steps of 2 s."""


def test_an_average_step_is_one_of_those_asked_for_with_all_waiting_for_checkpoints():
    # 3 s of step 4 were a checkpoint
    times = [(1, 9.0), (2, 10.0), (3, 12.0), (4, 17.0), (5, 19.0), (6, 99.0)]
    checkpoints = [
        {"time": 15.5, "stall_seconds": 3.0, "step": 3},
        {"time": 60.0, "stall_seconds": 50.0, "step": 6},
    ]
    found = disturbance.calm(record(times, killed_at=20.0), 2, 5, checkpoints)
    assert found == disturbance.Calm(steps=3, step_seconds=3.0, waiting=3.0)
    with pytest.raises(ValueError, match="1 steps after 4 up to 6 were finished before the kill"):
        disturbance.calm(record(times, killed_at=20.0), 4, 6, [])


def test_a_usual_step_is_one_before_the_kill_or_after_all_is_whole():
    times = [*STEADY[:5], (6, 15.0), (7, 17.5), (8, 20.0), (9, 21.0), (10, 22.0), (11, 23.0)]
    before = disturbance.Calm(steps=3, step_seconds=2.0, waiting=0.0)
    assert disturbance.usual(record(times, killed_at=11.0, whole_at=20.0), before) == 1.5
    assert disturbance.usual(record(times, killed_at=11.0), before) == 2.0


def test_an_evaluation_between_two_steps_is_no_training_time():
    times = [(1, 1.0), (2, 3.0), (3, 9.0), (4, 11.0)]
    assert disturbance.calm(record(times, evaluations=((2, 7.0),)), 1, 4, []).step_seconds == 2.0


def test_what_a_kill_costs_where_one_step_is_redone_and_rows_come_back_meanwhile():
    """Killed at 11 s in step 6, which finishes at 15 s instead of 12 s.

    All is rebuilt at 20 s; steps take 2.5 s while rebuilding.
    """
    times = [*STEADY[:5], (6, 15.0), (7, 17.5), (8, 20.0), (9, 22.0), (10, 24.0)]
    run = record(times, killed_at=11.0, whole_at=20.0)
    found = disturbance.cost(run, 2.0)
    assert (found.gap, found.lost, found.redone, found.recovery) == (5.0, 3.0, 1, 0.25)
    assert found.lost_whole == 3.0 + 2 * 0.5
    assert found.whole_after == 9.0
    assert found.kept_recovering == pytest.approx(3 / 10 * 2)
    assert found.kept_rebuilding == pytest.approx(2 / 5 * 2)


def test_what_a_kill_costs_where_all_go_back_to_a_checkpoint():
    """Killed at 11 s in step 6, and back at step 3 at 16 s.

    Steps 4 and 5 are done again until 20 s. Step 6 finishes for the first time at 22 s.
    """
    times = [*STEADY[:5], (4, 18.0), (5, 20.0), (6, 22.0), (7, 24.0)]
    run = record(times, killed_at=11.0, whole_at=16.0, redone=3)
    found = disturbance.cost(run, 2.0)
    assert (found.gap, found.lost, found.lost_whole, found.redone) == (8.0, 10.0, 10.0, 3)
    assert found.whole_after == 5.0 and found.kept_rebuilding is None
    assert found.kept_recovering == pytest.approx(1 / 12 * 2)


def test_rows_that_only_the_end_of_the_run_brought_back_have_no_time():
    run = record([*STEADY[:5], (6, 15.0), (7, 17.0)], killed_at=11.0, whole_at=30.0)
    found = disturbance.cost(run, 2.0)
    assert found.whole_after is None and found.kept_rebuilding == pytest.approx(1.0)


def test_a_run_that_was_not_killed_once_is_refused():
    with pytest.raises(ValueError, match="0 failures instead of one"):
        disturbance.cost(record(STEADY), 2.0)
    with pytest.raises(ValueError, match="before the second step or after the last"):
        disturbance.cost(record(STEADY, killed_at=50.0), 2.0)


def test_intervals_keep_the_ratio_to_the_seconds_of_a_checkpoint():
    setting = contenders.Setting(rows=1_000_000_000, row_bytes=1000, servers=10, storage_gbit=8.0)
    assert setting.checkpoint_seconds == 100.0  # 100 GB a server at 1 GB/s
    assert setting.checkpoints_per_interval(30) == 18.0
    assert contenders.interval_steps(setting, 30, checkpoint_seconds=0.5, step_seconds=0.1) == 90
    assert contenders.interval_steps(setting, 30, checkpoint_seconds=0.5, step_seconds=100.0) == 1
    assert contenders.PAPER.checkpoint_seconds == pytest.approx(8 * 197_767_405 * 1024 / 5 / 1.25e9)


# 1 TB on 100 servers that write 1 GB/s: a checkpoint takes 10 s; a server fails every 1,000,000 s,
# one of them every 10,000 s.
CLUSTER = model.ClusterModel(
    table_bytes=1e12, servers=100, server_mtbf_seconds=1e6, storage_bytes_per_second=1e9
)


MEASURED = model.MeasuredInputs(
    parity_cost=0.04,
    async_share=0.2,
    lost_seconds=0.5,
    kept=0.9,
    notice_seconds=0.1,
    rebuild_bytes_per_second=5e8,
    extra=0.25,
)


def test_the_model_of_checkpoints():
    assert (CLUSTER.mtbf, CLUSTER.checkpoint_seconds) == (10_000.0, 10.0)
    found = model.of_checkpoints(CLUSTER, 1000.0, MEASURED)
    assert found.normal == pytest.approx(0.01)
    assert found.lost == pytest.approx(500 + 2 * 10 + 0.1)
    assert found.failures == pytest.approx(520.1 / 10_000)
    assert found.total == pytest.approx(0.01 + 0.05201)
    found = model.of_checkpoints(CLUSTER, 1000.0, MEASURED, background=True)
    assert found.normal == pytest.approx(0.002) and found.lost == pytest.approx(500 + 30 + 0.1)


def test_no_interval_between_checkpoints_is_better_than_the_best():
    best = model.best_interval(CLUSTER)
    assert best == pytest.approx(math.sqrt(2 * 10 * 10_000))
    least = model.of_checkpoints(CLUSTER, best, MEASURED).total
    assert all(
        model.of_checkpoints(CLUSTER, best * factor, MEASURED).total > least
        for factor in (0.5, 0.9, 1.1, 2)
    )


def test_the_model_of_erasure():
    """10 GB of rows and 2.5 GB of parity come back in 25 s, at a tenth less throughput."""
    found = model.of_erasure(CLUSTER, MEASURED)
    assert (found.normal, found.lost, found.slow) == (0.04, 0.5, pytest.approx(25.0))
    assert found.failures == pytest.approx((0.5 + 2.5) / 10_000)
    half = model.of_erasure(replace(CLUSTER, table_bytes=5e11), MEASURED)
    assert half.normal == found.normal and half.slow == pytest.approx(12.5)


def line(contender, number=0, **more):
    """A line of protections.csv, as text."""
    fields = {
        "regime": "embedding-heavy",
        "round": number,
        "contender": contender,
        "servers": 5,
        "step_ms": 100,
        "overhead": "",
        "gap_ms": "",
        "lost_ms": "",
        "lost_whole_ms": "",
        "redone_steps": "",
        "whole_after_s": "",
        "kept_recovering": "",
        "kept_rebuilding": "",
        "recovery_ms": "",
        "checkpoint_bytes": "",
        "checkpoint_wait_ms": "",
        "checkpoint_every_steps": "",
        "rows_bytes": 1000,
        "redundancy_bytes": 0,
        "model_sha256": "aa",
        "undisturbed_sha256": "aa",
    }
    return {key: str(value) for key, value in {**fields, **more}.items()}


LINES = [
    line("none"),
    line("none", 1, step_ms=200),
    line(
        "erasure-k4",
        overhead=0.02,
        lost_ms=50,
        lost_whole_ms=90,
        redundancy_bytes=250,
        kept_recovering=0.95,
        kept_rebuilding=0.9,
        whole_after_s=2,
        recovery_ms=20,
    ),
    line(
        "erasure-k4",
        1,
        overhead=0.04,
        lost_ms=150,
        lost_whole_ms=190,
        redundancy_bytes=250,
        kept_recovering=0.85,
        kept_rebuilding=0.8,
        whole_after_s=4,
        recovery_ms=40,
    ),
    line(
        "checkpoint-30-sync",
        step_ms=120,
        overhead=0.2,
        lost_ms=2000,
        checkpoint_bytes=40_000_000,
        checkpoint_wait_ms=500,
        checkpoint_every_steps=20,
    ),
    line(
        "checkpoint-30-sync",
        1,
        step_ms=240,
        overhead=0.2,
        lost_ms=3000,
        checkpoint_bytes=40_000_000,
        checkpoint_wait_ms=500,
        checkpoint_every_steps=20,
    ),
    line(
        "checkpoint-30-async", overhead=0.1, lost_ms=2500, checkpoint_wait_ms=100, model_sha256="bb"
    ),
]


def test_overheads_are_those_of_each_round_and_none_has_none():
    found = versus.overheads(LINES)
    assert found["embedding-heavy", "erasure-k4"] == [pytest.approx(0.02), pytest.approx(0.04)]
    assert found["embedding-heavy", "checkpoint-30-sync"] == [
        pytest.approx(0.2),
        pytest.approx(0.2),
    ]
    assert ("embedding-heavy", "none") not in found


def test_of_several_starts_each_has_its_overhead_and_rows_without_have_the_one():
    rows = [*LINES[:3], line("erasure-k4", 1, overhead=0.03, overhead_by_start="0.05 0.03 0.01")]
    assert versus.overheads(rows)["embedding-heavy", "erasure-k4"] == [0.02, 0.05, 0.03, 0.01]


def test_the_bars_are_worked_out_from_the_rounds():
    found = {(bar.what, bar.at_least): bar for bar in versus.bars(LINES)}
    cut = found["overhead saved against checkpoint-30-sync, as a share", True]
    assert cut.values == (pytest.approx(0.9), pytest.approx(0.8)) and not cut.met
    faster = found["lost progress of checkpoint-30-sync / that of erasure-k4", True]
    assert faster.values == (40.0, 20.0) and faster.met
    drop = found["erasure-k4: drop of samples/s while recovering, gap included", False]
    assert drop.values == (pytest.approx(0.05), pytest.approx(0.15)) and not drop.met
    assert found["erasure-k4: share of runs with the undisturbed model", True].met
    assert found["erasure-k4: redundancy / rows, in bytes", False].met
    assert str(cut).endswith("not met") and faster.verdict == "met"
    once = versus.bars(
        [
            *LINES,
            line("erasure-k4", 2, overhead=0.01, lost_ms=200),
            line("checkpoint-30-sync", 2, overhead=0.2, lost_ms=2000),
        ]
    )
    verdicts = {bar.what: bar.verdict for bar in once}
    assert (
        verdicts["overhead saved against checkpoint-30-sync, as a share"]
        == "met by the median only"
    )
    assert (
        verdicts["lost progress of checkpoint-30-sync / that of erasure-k4"]
        == "met by the median only"
    )


def test_one_model_that_differs_or_one_run_that_holds_more_misses_the_bar():
    wrong = [
        line(
            "erasure-k4",
            number,
            redundancy_bytes=260 if number == 1 else 250,
            model_sha256="bb" if number == 2 else "aa",
        )
        for number in range(3)
    ]
    found = {
        bar.what: bar
        for bar in versus.bars([*(line("none", number) for number in range(3)), *wrong])
    }
    assert not found["erasure-k4: share of runs with the undisturbed model"].met
    assert not found["erasure-k4: redundancy / rows, in bytes"].met


def test_models_and_scores_are_compared_with_those_of_none():
    assert versus.equal_models(LINES)["embedding-heavy", "checkpoint-30-async"] == [False]
    scores = [
        {"regime": "criteo", "contender": name, "step": str(step), "auc": auc}
        for name, aucs in (("none", ("0.6", "0.7")), ("stateless-30", ("0.6", "0.69", "")))
        for step, auc in enumerate(aucs)
    ]
    assert versus.auc_differences(scores)["criteo", "stateless-30"] == pytest.approx(-0.01)


def test_sizes_ascend():
    tables = program("lib.protection_tables")
    rows = [
        {"round": number, "share": share, "contender": name, "rows_bytes": held, "overhead": cost}
        for number in ("0", "1")
        for share, held in (("1.0", 1000), ("0.5", 500))
        for name, cost in (
            ("checkpoint-30-sync", 0.1),
            ("erasure-k4", 0.04 if share == "1.0" else 0.02),
        )
    ]
    ours = {held: by_name["erasure-k4"] for held, by_name in tables.sizes(rows).items()}
    assert list(ours.items()) == [(500, [pytest.approx(2.0)] * 2), (1000, [pytest.approx(4.0)] * 2)]


def test_a_turn_without_a_step_of_some_run_counts_for_no_run():
    counted = program("lib.interleaved").counted
    assert counted({"one": [1.0, None, 3.0], "other": [4.0, 5.0, 6.0]}) == {
        "one": [1.0, 3.0],
        "other": [4.0, 6.0],
    }
    with pytest.raises(
        ValueError,
        match=r"^only 1 of 3 turns have a step of every run \(turns without: one 1, other 1\): "
        "give longer turns$",
    ):
        counted({"one": [1.0, None, 3.0], "other": [None, 5.0, 6.0], "third": [1.0, 1.0, 1.0]})


def test_stops_are_no_part_of_the_pace_by_which_turns_are_as_long_as_some_steps():
    interleaved = program("lib.interleaved")
    ran = [(0.0, 3.0), (10.0, 12.0), (20.0, 21.0)]
    finished = [(1, 1.0), (2, 2.0), (3, 11.0), (4, 20.5)]
    assert interleaved.running(finished, ran) == [(1, 1.0), (2, 2.0), (3, 4.0), (4, 5.5)]
    assert interleaved.several_steps(6)(interleaved.running(finished, ran)) == pytest.approx(
        6 * 1.75
    )


def test_only_steps_within_a_turn_count():
    interleaved = program("lib.interleaved")
    # step 4 was not told
    finished = [(1, 0.5), (2, 1.1), (3, 1.3), (5, 1.9), (6, 2.5), (7, 4.2), (8, 4.7)]
    assert interleaved.step_seconds(finished, [(1.0, 2.0), (4.0, 5.0)]) == [
        pytest.approx(0.8 / 3),
        pytest.approx(0.5),
    ]
    assert interleaved.step_seconds(finished, [(2.0, 3.0)]) == [None]
    assert interleaved.Beside([1.1, 2.4, 9.0], [1.0, 2.0, 3.0]).overhead == pytest.approx(0.2)


def test_an_overhead_has_waiting_for_checkpoints_and_what_steps_cost():
    bench = program("bench_protections")
    assert bench.waiting(
        disturbance.Calm(steps=20, step_seconds=0.12, waiting=0.4)
    ) == pytest.approx(0.2)
    assert [
        name for name, contender in contenders.CONTENDERS.items() if not bench.steps_cost(contender)
    ] == [
        "none",
        "checkpoint-30-sync",
        "checkpoint-60-sync",
    ]
    before, start = (
        disturbance.Calm(steps=20, step_seconds=0.12, waiting=0.4),
        program("lib.interleaved").Beside([1.0, 1.1, 1.8], [1.0, 1.0, 1.0]),
    )
    beside = [start, program("lib.interleaved").Beside([1.5], [1.0])]
    found = {
        name: bench.overheads_of(contenders.CONTENDERS[name], before, beside)
        for name in ("checkpoint-30-sync", "checkpoint-30-async", "erasure-k4", "stateless-30")
    }
    assert found == {
        "checkpoint-30-sync": [0.2],
        "checkpoint-30-async": [0.3, 0.5],
        "erasure-k4": [0.1, 0.5],
        "stateless-30": [0.3, 0.7],
    }
    assert bench.overheads_of(contenders.CONTENDERS["erasure-k4"], before, ()) == []


def test_one_run_that_fails_costs_itself_alone(monkeypatch, capsys, tmp_path):
    bench = program("bench_protections")
    monkeypatch.setattr(
        bench.measure,
        "run",
        lambda folder, sets, kills: (
            folder.mkdir(),
            bench.sys.exit("ecrm launch failed: no memory"),
        ),
    )

    def rows():
        yield 1
        bench.run(tmp_path / "run", {})

    assert bench.tried(rows) == [1] and not (tmp_path / "run").exists()
    assert capsys.readouterr().out == "left out: ecrm launch failed: no memory\n"


def test_pre_touching_goes_once_through_every_row_and_leaves_the_rest(tmp_path, criteo_rows):
    from ecrm.data.dataset import CriteoDataset

    pre_touched, manifests = (
        program("lib.pre_touched"),
        __import__("ecrm.data.dataset_info", fromlist=["read_manifest"]),
    )
    steps = pre_touched.pre_touch(criteo_rows, tmp_path / "touched", most_rows=300, batch=64)
    assert (
        steps == 5
        and pre_touched.pre_touch(criteo_rows, tmp_path / "touched", most_rows=300, batch=64) == 5
    )
    given, found = (
        CriteoDataset.open(folder, 300, 0.1) for folder in (criteo_rows, tmp_path / "touched")
    )
    found.verify()
    assert found.tables == given.tables
    _, ids, _ = found.train_batch(0, steps * 64)
    assert all(
        set(ids[:, table].tolist()) == set(range(rows))
        for table, (_, rows) in enumerate(found.tables)
    )
    rows = manifests.read_manifest(criteo_rows)["rows"]
    assert manifests.read_manifest(tmp_path / "touched")["rows"] == rows + steps * 64
    for a, b in zip(found.train_batch(steps * 64, 100), given.train_batch(0, 100), strict=True):
        assert (a == b).all()


def test_the_kill_comes_half_an_interval_after_a_checkpoint_that_has_one_before():
    bench = program("bench_protections")
    regime = bench.Regime("embedding-heavy", {}, None, warm=24, shard_rows=10_000)
    sync, incremental = (
        contenders.CONTENDERS["checkpoint-30-sync"],
        contenders.CONTENDERS["checkpoint-30-incremental"],
    )
    for every in (7, 8, 20, 100):
        plan = bench.plan_of(regime, sync, every, bench.FULL, 0)
        assert plan.first >= regime.warm and plan.kill_step - plan.first == every
        assert plan.kill_step % every == every // 2 and plan.kill_step // every * every > plan.first
        assert (
            bench.plan_of(regime, incremental, every, bench.FULL, 0).kill_step // every - 1
            >= regime.warm / every
        )
    plan = bench.plan_of(regime, contenders.CONTENDERS["erasure-k4"], 0, bench.FULL, 0)
    assert plan.first == 24 and 104 <= plan.kill_step < 124
    # 24 + 80 + 20 + 60, rounded up
    assert {
        bench.plan_of(regime, contenders.CONTENDERS["none"], 0, bench.FULL, number).steps
        for number in range(9)
    } == {200}
    slow = contenders.CONTENDERS["erasure-k4"]
    assert slow.redundancy == 0.25 and contenders.CONTENDERS["chain-3"].redundancy == 2
    # 24 + 80 + 20 + 293, rounded up
    assert bench.plan_of(replace(regime, shard_rows=720_000), slow, 0, bench.FULL, 0).steps == 500


def test_the_models_inputs_are_medians_of_what_was_measured():
    found = model.measured_of(LINES, "embedding-heavy")
    assert found == model.MeasuredInputs(
        parity_cost=pytest.approx(0.03),
        async_share=pytest.approx(0.5),
        lost_seconds=pytest.approx(0.1),
        kept=pytest.approx(0.85),
        notice_seconds=pytest.approx(0.03),
        rebuild_bytes_per_second=pytest.approx(40e6 / 5 * 1.25 / 3),
        extra=0.25,
    )
    with pytest.raises(model.NotMeasured, match="no checkpoint_bytes of checkpoint-30-sync"):
        model.measured_of(
            [row for row in LINES if row["contender"] != "checkpoint-30-sync"], "embedding-heavy"
        )


def test_the_model_is_written_and_marked_as_one(tmp_path, capsys):
    with pytest.raises(
        SystemExit, match="there is no .*protections.csv: run bench_protections.py first"
    ):
        model.main(["--results", str(tmp_path)])
    program("lib.measure").write_csv(tmp_path / "protections.csv", LINES)
    model.main(["--results", str(tmp_path), "--server-mtbf-hours", "5000", "--storage-gbit", "25"])
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(said.startswith("model: ") for said in lines)
    with (tmp_path / "protections_model.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["what"] for row in rows} == {"model"} and {
        row["server_mtbf_hours"] for row in rows
    } == {"5000"}
    at = {
        row["protection"]: row
        for row in rows
        if (row["tables_gb"], row["servers"], row["interval_minutes"])
        in (("1000", "5", "30"), ("1000", "5", ""))
    }
    assert float(at["checkpoint"]["checkpoint_seconds"]) == pytest.approx(200e9 / 3.125e9)
    assert float(at["checkpoint"]["normal_overhead"]) == pytest.approx(64 / 1800, rel=1e-4)
    assert float(at["erasure k=4 m=1"]["normal_overhead"]) == pytest.approx(0.03)


def test_the_committed_model_is_that_of_the_committed_measurements(tmp_path):
    results = program("lib.measure").RESULTS
    if not (results / "protections.csv").exists():
        assert not (results / "protections_model.csv").exists()
        return
    with (results / "protections_model.csv").open() as file:
        (assumed,) = {
            (row["server_mtbf_hours"], row["storage_gbit"]) for row in csv.DictReader(file)
        }
    (tmp_path / "protections.csv").write_bytes((results / "protections.csv").read_bytes())
    model.main(
        [
            "--results",
            str(tmp_path),
            "--server-mtbf-hours",
            assumed[0],
            "--storage-gbit",
            assumed[1],
        ]
    )
    assert (tmp_path / "protections_model.csv").read_text() == (
        results / "protections_model.csv"
    ).read_text()


def test_tables_and_figures_are_made_of_the_rows_alone(tmp_path):
    tables = program("lib.tables")
    program("lib.measure").write_csv(tmp_path / "protections.csv", LINES)
    model.main(["--results", str(tmp_path)])
    shown = tables.content("protections", tmp_path).splitlines()
    assert (
        "| embedding-heavy | erasure-k4 | 3.0 (2.0 to 4.0) | 0.25 | - | 100 (50 to 150) | 140 "
        "(90 to 190) | - | 3.00 (2.00 to 4.00) "
        "| 0.90 (0.85 to 0.95) | 2 of 2 |"
    ) in shown
    assert (
        "| embedding-heavy | erasure-k4 | 3.0 (2.0 to 4.0) | 0.25 | 100 | 140 | 0.90 | yes |"
        in tables.content("protections short", tmp_path).splitlines()
    )
    shown = tables.content("protections bars", tmp_path)
    assert (
        "| embedding-heavy | overhead saved against checkpoint-30-sync, as a share | 0.850 "
        "(0.800 to 0.900) | at least 0.9 | not met |" in shown
    )
    assert tables.content("protections model", tmp_path).startswith("| MODEL: regime |")
    pytest.importorskip("matplotlib")
    figures = program("lib.figures")
    for name in ("protections", "protections_model"):
        figure = figures.FIGURES[name]
        figures.picture(figure, tmp_path / figure.csv, tmp_path / f"{name}.png")
        assert figures.stale(tmp_path / figure.csv, tmp_path / f"{name}.png") is None


def test_wrong_options_end_in_one_line(tmp_path, capsys):
    bench = program("bench_protections")
    for words in (["--rounds", "0"], ["--storage-gbit", "0"], ["--part", "accuracy", "--add"]):
        with pytest.raises(SystemExit):
            bench.main(words)
        assert "error: " in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit, match="no file there"):
        list(bench.real_rows(tmp_path / "nothing"))
    with pytest.raises(SystemExit, match="there is no .*protections.csv"):
        bench.main(["--table", "--output", str(tmp_path)])


def test_measuring_one_regime_leaves_what_is_known_of_the_others(tmp_path):
    bench = program("bench_protections")
    rows = [
        {"regime": regime, "contender": "none", "step_ms": step}
        for regime, step in (("dense-heavy", 1.5), ("criteo", 2.5))
    ]
    bench.measure.write_csv(
        tmp_path / "protections.csv", [{**row, **bench.measure.device()} for row in rows]
    )
    files = bench.Files(tmp_path, ["criteo"])
    files.add("", [{"regime": "criteo", "contender": "none", "step_ms": 3.5}])
    found = bench.read_rows(tmp_path / "protections.csv")
    assert [(row["regime"], float(row["step_ms"])) for row in found] == [
        ("dense-heavy", 1.5),
        ("criteo", 3.5),
    ]


def test_bytes_written_are_a_step_s_share_of_a_checkpoint(tmp_path):
    bench = program("bench_protections")
    files = bench.Files(tmp_path, ["criteo"])
    names = ("none", "checkpoint-30-sync", "checkpoint-30-incremental", "checkpoint-60-sync")
    files.add(
        "_bytes",
        [
            {
                "regime": "criteo",
                "contender": name,
                "written_bytes_per_step": "" if "check" in name else 0,
            }
            for name in names
        ],
    )
    sizes = ("", 8000, 800, "")
    killed = zip(names, sizes, ("", 10, 10, 20), strict=True)
    files.add(
        "",
        [
            {
                "regime": "criteo",
                "contender": name,
                "checkpoint_bytes": size,
                "checkpoint_every_steps": every,
            }
            for name, size, every in killed
        ],
    )
    found = {
        row["contender"]: row["written_bytes_per_step"]
        for row in bench.read_rows(tmp_path / "protections_bytes.csv")
    }
    # One in eight incremental ones is as large as a full one: (7 * 800 + 8000) / 8 in ten steps.
    assert found == {
        "none": "0",
        "checkpoint-30-sync": "800",
        "checkpoint-30-incremental": "170",
        "checkpoint-60-sync": "",
    }


def test_rounds_are_added_to_those_there_are_unless_they_are_of_another_machine_or_library(
    tmp_path, capsys
):
    bench, about = program("bench_protections"), program("lib.measure").device()
    rows = [
        {"regime": regime, "contender": "none", "round": number}
        for regime, number in (("criteo", 0), ("criteo", 1), ("dense-heavy", 7))
    ]
    bench.measure.write_csv(tmp_path / "protections.csv", [{**row, **about} for row in rows])
    files = bench.Files(tmp_path, ["criteo"], keep=True)
    assert files.next_round(["criteo"]) == 2 and files.next_round(["embedding-heavy"]) == 0
    assert (
        files.has("", "criteo", "none")
        and not files.has("", "criteo", "erasure-k4")
        and not files.has("_accuracy", "criteo")
    )
    files.add("", [{"regime": "criteo", "contender": "none", "round": 2}])
    # dense-heavy comes first
    assert [row["round"] for row in bench.read_rows(tmp_path / "protections.csv")] == [
        "7",
        "0",
        "1",
        "2",
    ]

    with pytest.raises(
        bench.TableError, match="has 5 bytes of rows, not 6: measure it without --add"
    ):
        files.add("", [{"regime": "criteo", "contender": "chain-2", "round": 0, "rows_bytes": 5}])
        files.add("", [{"regime": "criteo", "contender": "chain-2", "round": 1, "rows_bytes": 6}])

    bench.measure.write_csv(
        tmp_path / "protections.csv", [{**rows[0], **about, "ecrm_commit": "abc1234"}]
    )
    bench.Files(tmp_path, ["criteo"], keep=True)
    assert capsys.readouterr().out.startswith("adding to rounds of abc1234: ")
    bench.measure.write_csv(tmp_path / "protections.csv", [{**rows[0], **about, "torch": "1.0"}])
    with pytest.raises(
        SystemExit,
        match="^--add: what there is of criteo was measured with torch 1.0, not .*: measure it "
        "without --add$",
    ):
        bench.main(
            ["--add", "--regime", "criteo", "--output", str(tmp_path), "--data", str(tmp_path)]
        )

"""From synthetic events to the comparison: throughput, table, verdict, picture and page."""

import re
from dataclasses import replace

import pytest

from ecrm.config.faults import Kill
from ecrm.drill.charts import deaths, throughput
from ecrm.drill.options import Disturbance, HostKill, RandomKills
from ecrm.drill.page import page
from ecrm.drill.report import make_report, problems, to_dict
from ecrm.drill.run_record import KillDone, RunRecord, run_record
from ecrm.drill.svg import placed
from ecrm.drill.table import as_text, failure_cells, pace_cells
from ecrm.drill.throughput import bucket_rates, bucket_seconds, open_times, pace, spans
from ecrm.drill.timeline import rebuild_curves

T = 1000.0
BATCH = 10
SCHEDULED = Disturbance(scheduled=(Kill(1, 10, "parity"),))


def steps(*times: tuple[int, float], rebuilt: float = 1.0) -> dict:
    """A progress event that reports these (step, seconds after the start)."""
    finished = [[step, T + time] for step, time in times]
    return {"time": finished[-1][1], "event": "progress", "rebuilt": rebuilt, "finished": finished}


def every_second(first: int, last: int, shift: float = 0.0) -> list[tuple[int, float]]:
    return [(step, step + shift) for step in range(first, last + 1)]


def kill(at: float, rank: int = 1, scheduled: str | None = "1@10:parity") -> KillDone:
    return KillDone(T + at, rank, scheduled, pid=99)


def failure(at: float, step: int, ranks=(1,), shards=(1,), redone: int = 1) -> dict:
    """Noticed `at` seconds after the start, recovered from half a second later."""
    return {
        "time": T + at + 0.5,
        "event": "failure",
        "ranks": list(ranks),
        "step": step,
        "phase": "parity",
        "redone_steps": redone,
        "recovery_seconds": 0.5,
        "shards": {str(shard): 5 for shard in shards},
        "slots": {},
    }


def resumed(at: float, stall: float, ranks=(1,)) -> dict:
    return {"time": T + at, "event": "resumed", "ranks": list(ranks), "stall_seconds": stall}


def rebuilt(at: float, seconds: float, ranks=(1,)) -> dict:
    fields = {"rebuild_seconds": seconds, "rebuilt_bytes": 1234567, "on_demand_rows": 42}
    return {"time": T + at, "event": "rebuilt", "ranks": list(ranks), **fields}


def run(
    *happened: dict | KillDone, last: int = 20, sha: str = "a" * 64, failures=(), completed=True
) -> RunRecord:
    summary = (
        {"completed": True, "steps": last, "model_sha256": sha, "failures": list(failures)}
        if completed
        else {}
    )
    kills = [one for one in happened if isinstance(one, KillDone)]
    events = [one for one in happened if not isinstance(one, KillDone)]
    return run_record([{"time": T, "event": "start", "world_size": 6}, *events], summary, kills)


def reshaped(at: float, step: int) -> dict:
    fields = {
        "servers": 3,
        "k": 2,
        "m": 1,
        "seconds": 0.25,
        "moved_bytes": 7654321,
        "failures_left": 1,
    }
    return {"time": T + at, "event": "reshaped", "step": step, **fields}


UNDISTURBED = run(steps(*every_second(1, 20)))
# Rank 1 dies 10.2 s after the start; step 11 finishes at 13 instead of 11; rebuilt at 15.5; the
# rest is two seconds late.
SURVIVED = run(
    steps(*every_second(1, 10)),
    kill(10.2),
    failure(10.5, 10),
    resumed(13.0, 3.0),
    steps(*every_second(11, 13, shift=2), rebuilt=0.5),
    rebuilt(15.5, 5.0),
    steps(*every_second(14, 20, shift=2)),
)


def report(disturbed: RunRecord, disturbance: Disturbance = SCHEDULED, **more):
    return make_report("tiny", BATCH, disturbance, UNDISTURBED, disturbed, **more)


def paces(disturbed: RunRecord) -> dict[str, tuple[int, float]]:
    return {name: (found.steps, found.seconds) for name, found in report(disturbed).paces.items()}


# -- records
#  ------------------------------------------------------------------------------------------


def test_a_failure_is_put_together_from_its_events():
    (found,) = SURVIVED.failures
    assert (found.ranks, found.step, found.phase, found.shards) == ((1,), 10, "parity", (1,))
    assert (
        found.killed_at == T + 10.2 and found.noticed_at == T + 10.5 and found.whole_at == T + 15.5
    )
    assert (found.stall_seconds, found.recovery_seconds, found.rebuild_seconds) == (3.0, 0.5, 5.0)
    assert (found.redone_steps, found.on_demand_rows, found.lost_bytes) == (1, 42, 1234567)


def test_a_failure_whose_events_died_with_the_reporter_is_taken_from_the_summary():
    entry = {
        "ranks": [1],
        "step": 10,
        "phase": "dense",
        "redone_steps": 2,
        "recovery_seconds": 0.5,
        "shards": [1],
    }
    entry |= {"stall_seconds": 3.0, "rebuild_seconds": 5.0, "rebuilt_bytes": 9, "on_demand_rows": 8}
    (found,) = run(steps(*every_second(1, 20)), kill(10.2), failures=[entry]).failures
    assert (found.noticed_at, found.began_at, found.whole_at) == (None, T + 10.2, T + 15.2)
    assert (found.lost_bytes, found.on_demand_rows) == (9, 8)
    (found,) = run(steps(*every_second(1, 20)), failures=[entry]).failures
    assert found.began_at == T + 10, (
        "no kill is known either: when the last step before it was finished"
    )


def test_a_rank_that_joins_and_dies_again_is_two_failures():
    again = {"time": T + 20.5, "event": "joined", "ranks": [1], "slots": {}}
    record = run(
        *(steps(*every_second(1, 30)), kill(10.2), failure(10.5, 10), resumed(13.0, 3.0)),
        *(rebuilt(15.5, 5.0), again, kill(24.1), failure(24.5, 24), resumed(25.0, 1.0)),
        last=30,
        failures=[{"ranks": [1], "step": 10}, {"ranks": [1], "step": 24}],
    )
    first, second = record.failures
    assert (first.step, first.killed_at, first.stall_seconds, first.whole_at) == (
        10, T + 10.2, 3.0, T + 15.5
    )  # fmt: skip
    assert (second.step, second.killed_at, second.stall_seconds) == (24, T + 24.1, 1.0)
    assert second.whole_at is None


def test_a_failure_without_lost_rows_is_over_with_its_recovery():
    (found,) = run(steps(*every_second(1, 20)), failure(10.5, 10, shards=())).failures
    assert (found.whole_at, found.rebuild_seconds, found.lost_bytes) == (T + 11.0, 0.0, 0)


# -- throughput
#  ---------------------------------------------------------------------------------------


def test_without_failures_everything_is_before():
    assert paces(UNDISTURBED) == {
        "undisturbed": (19, 19.0),
        "before": (19, 19.0),
        "during": (0, 0.0),
        "after": (0, 0.0),
        "disturbed": (19, 19.0),
    }


def test_before_during_after():
    found = paces(SURVIVED)
    assert found["before"] == (9, 9.0)
    assert found["during"] == (4, 6.0), (
        "steps 11 to 14: from step 10 until the step in which the last row was rebuilt"
    )
    assert found["after"] == (6, 6.0)
    assert found["disturbed"] == (19, 21.0)


def test_redone_steps_count_once():
    """With a commit interval, steps 9 and 10 are undone and done again.

    The first time that they finish counts.
    """
    disturbed = run(
        steps(*every_second(1, 10)),
        kill(10.2),
        failure(10.5, 10, shards=(), redone=3),
        steps((9, 13), (10, 14), *every_second(11, 20, shift=4)),
    )
    found = paces(disturbed)
    assert found["before"] == (9, 9.0) and found["disturbed"] == (19, 23.0)
    assert [span.steps for span in spans(disturbed)][8:13] == [1, 0, 0, 1, 1]
    assert disturbed.unwritten_steps == 0


def test_a_reporter_that_died_between_progress_lines():
    """The times of steps 6 to 9 are gone; the steps themselves are not."""
    disturbed = run(
        steps(*every_second(1, 5)),
        kill(9.2),
        failure(9.4, 9, shards=()),
        steps(*every_second(10, 20)),
    )
    found = paces(disturbed)
    assert (
        found["before"] == (4, 4.0) and found["during"] == (5, 5.0) and found["after"] == (10, 10.0)
    )
    assert disturbed.unwritten_steps == 4
    assert (
        "the times of 4 of 20 steps of the disturbed run died with the rank that reports"
        in report(disturbed).notes[0]
    )


def test_steps_reported_by_two_ranks_count_once():
    """A reporter dies right after it has written its line.

    The next reporter does not know of that line and reports the steps again.
    """
    disturbed = run(steps(*every_second(1, 10)), steps(*every_second(8, 20, shift=0.01)))
    assert pace(spans(disturbed), BATCH).steps == 19
    assert pace(spans(disturbed), BATCH).seconds == pytest.approx(19.01)


def test_never_rebuilt():
    late = steps(*every_second(11, 20, shift=2))
    disturbed = run(
        steps(*every_second(1, 10)), kill(10.2), failure(10.5, 10), resumed(13, 3), late
    )
    found = paces(disturbed)
    assert found["during"] == (10, 12.0) and found["after"] == (0, 0.0)
    assert failure_cells(report(disturbed).disturbed)[0][-2:] == ["never", "?"]


def test_a_failure_after_the_last_step_disturbs_no_step():
    disturbed = run(steps(*every_second(1, 20)), kill(20.5), failure(20.6, 20), rebuilt(22.0, 1.4))
    assert paces(disturbed)["before"] == (19, 19.0)
    cells = failure_cells(report(disturbed).disturbed)[0]
    assert cells[6] == "none", "no step came after it, so there is no gap"
    assert report(disturbed).line.seconds == 22.0


def test_overlapping_failures_are_one_disturbance():
    disturbed = run(
        steps(*every_second(1, 20)),
        failure(5.5, 5, ranks=(0,), shards=(0,)),
        failure(6.5, 6, ranks=(2,), shards=(2,)),
        rebuilt(7.2, 1, ranks=(0,)),
        rebuilt(8.2, 1, ranks=(2,)),
        failure(15.5, 15, ranks=(3,), shards=()),
    )
    assert open_times(disturbed.failures) == [(T + 5.5, T + 8.2), (T + 15.5, T + 16.0)]
    assert paces(disturbed) | {"undisturbed": ()} == {
        "undisturbed": (),
        "before": (4, 4.0),
        "during": (5, 5.0),
        "after": (10, 10.0),
        "disturbed": (19, 19.0),
    }


def test_the_time_of_evaluations_belongs_to_no_step():
    evaluation = {"time": T + 14.0, "event": "evaluation", "step": 10}
    record = run(steps(*every_second(1, 10), *every_second(11, 20, shift=4)), evaluation)
    assert pace(spans(record), BATCH).seconds == 19.0


def test_buckets_hold_the_rate_of_their_time():
    found = spans(SURVIVED)
    rates = bucket_rates(found, T, 2.0, BATCH)
    assert len(rates) == 11
    assert (
        rates[0] == pytest.approx(10.0)
        and rates[5] == pytest.approx(10 / 3)
        and rates[8] == pytest.approx(10.0)
    )
    assert bucket_rates([], T, 2.0, BATCH) == []
    assert len(bucket_rates(spans(UNDISTURBED), T, 3.0, BATCH)) == 7, (
        "the last bucket, 18 to 20, is short"
    )
    assert len(bucket_rates(spans(UNDISTURBED), T, 6.5, BATCH)) == 3, (
        "a last bucket of half a second would be a peak"
    )


@pytest.mark.parametrize(
    ("duration", "step", "width"),
    [(80, 0.1, 1), (81, 0.1, 2), (400, 0.1, 5), (3, 0.02, 0.1), (0, 0, 0.001)],
)
def test_bucket_widths_are_round(duration, step, width):
    assert bucket_seconds(duration, step) == pytest.approx(width)


def test_rebuild_curves():
    (curve,) = rebuild_curves(SURVIVED)
    assert [(time - T, share) for time, share in curve][-2:] == [(15.0, 0.5), (15.5, 1.0)]
    assert curve[0] == (T + 10.2, 0.0)
    second = run(
        failure(5.0, 5, ranks=(0,), shards=(0,)),
        steps((6, 6.0), rebuilt=0.8),
        failure(7.0, 6, ranks=(2,), shards=(2,)),
        steps((7, 8.0), rebuilt=0.6),
    )
    (curve,) = rebuild_curves(second)
    points = [(time - T, share) for time, share in curve]
    assert points[1:] == [(5.0, 0.0), (6.0, 0.8), (7.0, 0.8), (7.0, 0.4), (8.0, 0.6), (8.0, 0.6)]


# -- verdict
#  ------------------------------------------------------------------------------------------


def test_a_drill_passes_only_if_all_of_it_happened():
    assert problems(SCHEDULED, UNDISTURBED, SURVIVED) == []
    assert report(SURVIVED).equal


def test_another_model_is_not_equal():
    other = run(steps(*every_second(1, 20)), kill(10.2), sha="b" * 64)
    assert problems(SCHEDULED, UNDISTURBED, other) == [
        f"model_sha256 NOT EQUAL: undisturbed {'a' * 64}, disturbed {'b' * 64}"
    ]
    assert "NOT the same model" in as_text(report(other)) and "NOT EQUAL" in as_text(report(other))


def test_another_model_is_no_failure_where_a_lost_shard_makes_it_one_by_nature():
    def stateless(other: RunRecord, sha: str, auc: float, loss: float, restored: list) -> RunRecord:
        protection = {"name": "stateless", "k": 1, "m": 0, "exact": False}
        more = {
            "model_sha256": sha,
            "protection": protection,
            "restored": restored,
            "eval_auc": auc,
            "eval_logloss": loss,
        }
        return replace(other, summary={**other.summary, **more})

    first, second = (
        stateless(UNDISTURBED, "a" * 64, 0.75, 0.5, []),
        stateless(SURVIVED, "b" * 64, 0.7475, 0.5031, [{"shard": 1}]),
    )
    found = make_report("tiny", BATCH, SCHEDULED, first, second)
    assert not found.problems and found.paces
    text = as_text(found)
    assert (
        f"model_sha256 not equal, by nature of stateless: undisturbed {'a' * 64}, disturbed "
        f"{'b' * 64}" in text
    )
    assert text.endswith(
        "evaluation auc 0.7500 undisturbed, 0.7475 disturbed (-0.0025); log loss 0.5000 "
        "undisturbed, 0.5031 disturbed (+0.0031)"
    )
    assert "not the same model, by nature" in text and "NOT" not in text
    html = page(found, {}, "")
    assert "Passed." in html and "(-0.0025)" in html
    numbers = to_dict(found)
    assert (
        numbers["exit_code"] == 0
        and not numbers["model_sha256_equal"]
        and not numbers["model_sha256_promised_equal"]
    )
    assert numbers["eval_auc_difference"] == pytest.approx(-0.0025) and numbers["restored"] == [
        {"shard": 1}
    ]
    unhurt = stateless(SURVIVED, "b" * 64, 0.7475, 0.5031, [])
    assert problems(SCHEDULED, first, unhurt) == [
        f"model_sha256 NOT EQUAL: undisturbed {'a' * 64}, disturbed {'b' * 64}"
    ]
    assert problems(SCHEDULED, first, replace(second, summary={})) == [
        "the disturbed run did not complete"
    ]


def test_a_run_that_did_not_complete():
    half = run(steps(*every_second(1, 9)), kill(9.5), completed=False)
    found = report(half, reason="ranks 0, 1 died")
    assert found.problems == ("the disturbed run did not complete: ranks 0, 1 died",)
    assert not found.equal and "the disturbed run did not complete" in as_text(found)
    nothing = report(run_record([], {}))
    assert nothing.problems[0] == "the disturbed run did not complete"
    assert "<svg" in page(nothing, {}, "")


def test_a_kill_that_never_happened():
    assert problems(SCHEDULED, UNDISTURBED, UNDISTURBED) == ["never happened: --kill 1@10:parity"]
    none = Disturbance(random=RandomKills(60.0))
    assert problems(none, UNDISTURBED, UNDISTURBED) == [
        "the run was over before any rank was killed (mean gap 60 s)"
    ]
    outside = run(steps(*every_second(1, 20)), kill(5, scheduled=None))
    assert problems(none, UNDISTURBED, outside) == []
    two = Disturbance(random=RandomKills(60.0, 2))
    assert problems(two, UNDISTURBED, outside) == ["1 of 2 kills happened before the run was over"]


def test_a_rank_that_killed_itself_was_not_killed_from_outside():
    own = {"time": T + 10.2, "event": "kill", "rank": 1, "scheduled": "1@10:parity"}
    assert problems(SCHEDULED, UNDISTURBED, run(steps(*every_second(1, 20)), own)) == [
        "never happened: --kill 1@10:parity"
    ]


def test_a_host_of_which_no_rank_was_killed():
    wanted = Disturbance(hosts=(HostKill("a", 5), HostKill("1", 9)))
    assert problems(wanted, UNDISTURBED, UNDISTURBED) == [
        "never happened: --kill-host a@5, --kill-host 1@9"
    ]
    one = run(steps(*every_second(1, 20)), kill(9.1, 3, "1@9"))
    assert problems(wanted, UNDISTURBED, one) == ["never happened: --kill-host a@5"]
    assert (
        problems(
            wanted,
            UNDISTURBED,
            run(steps(*every_second(1, 20)), kill(9.1, 3, "1@9"), kill(5.1, 0, "a@5")),
        )
        == []
    )


def test_wrong_parity_at_the_end_is_a_problem():
    wrong = run_record(
        [],
        {
            "completed": True,
            "steps": 0,
            "model_sha256": "a",
            "parity": {"stripes": 9, "mismatches": 2},
        },
    )
    assert (
        problems(Disturbance(), wrong, wrong)[-1]
        == "2 stripes of the disturbed run: wrong parity at the end"
    )


def test_notes():
    late = run(steps(*every_second(1, 20)), KillDone(T + 30, 4, pid=99, waited_seconds=1.5))
    notes = report(late, Disturbance(random=RandomKills(1.0))).notes
    assert notes == (
        "killed as the run ended, when nobody had to notice any more: 4",
        "1 of 1 kills were put off until one more could be survived, by 1.5 s at most",
    )
    per_rank = [
        {"rank": rank, "resident": rank * 10**8, "unused_spare": rank > 1} for rank in range(4)
    ]
    first = run_record([], {"completed": True, "steps": 20, "memory_bytes_per_rank": per_rank})
    assert first.unused_spares == {2: 200_000_000, 3: 300_000_000}
    held = make_report("tiny", BATCH, Disturbance(), first, late).notes[1]
    assert held == (
        "unused spares of the undisturbed run: 2, with 200 to 300 MB of anonymous memory each, "
        "also of shared libraries"
    )
    slow = run(steps(*[(step, 2.0 * step) for step in range(1, 21)]))
    assert "0.50 times as fast" in report(slow).notes[0]


# -- what people see
#  ----------------------------------------------------------------------------------


def test_the_table():
    text = as_text(report(SURVIVED, notes=["a note"]))
    lines = [re.sub(r" {2,}", "  ", line) for line in text.splitlines()]
    assert lines[0] == "drill of tiny: 1 rank killed, 1 failure survived, the same model to the bit"
    assert lines[1].endswith("rebuild s  lost bytes") and "lost: bytes of the lost shards" in text
    assert lines[1].split("  ")[:7] == [
        "ranks",
        "step",
        "at s",
        "phase",
        "noticed ms",
        "recovery ms",
        "gap ms",
    ]
    assert lines[2] == "1  10  10.20  parity  300  500  3,000  1  42  5.00  1,234,567"
    assert "undisturbed run  10  1.00  19  19.00" in lines
    assert " from a failure until rebuilt  7  0.67  4  6.00".strip() in "\n".join(lines)
    assert "note: a note" in lines and lines[-1] == f"model_sha256 equal: {'a' * 64}"


def test_the_table_without_failures():
    assert "no failure was survived" in as_text(report(UNDISTURBED))
    assert pace_cells(report(UNDISTURBED))[2][1:3] == ["-", "-"]


def test_the_pace_of_a_script_is_told_in_steps():
    """Nobody knows how many samples a step of it has, nor how long its evaluations took."""
    found = make_report("mine", None, SCHEDULED, UNDISTURBED, SURVIVED)
    lines = [re.sub(r" {2,}", "  ", line) for line in as_text(found).splitlines()]
    assert "throughput  useful steps/s  ratio  steps  time s" in lines
    assert "undisturbed run  1.0  1.00  19  19.00" in lines
    assert not any("evaluations" in line for line in lines)
    numbers = to_dict(found)["throughput"]["during"]
    assert numbers["ratio"] == pytest.approx(2 / 3) and numbers["samples_per_second"] is None
    assert found.line.undisturbed[1] == pytest.approx(1.0)


def test_the_numbers_as_json():
    found = to_dict(report(SURVIVED))
    assert found["exit_code"] == 0 and found["model_sha256_equal"]
    assert found["failures"][0]["killed_seconds"] == pytest.approx(10.2)
    assert found["throughput"]["during"]["ratio"] == pytest.approx(2 / 3)
    assert found["timeline"]["kills"] == ((pytest.approx(10.2), 1),)


def test_labels_of_kills_do_not_overlap():
    many = run(
        *(kill(at, rank) for rank, at in enumerate((3.0, 3.001, 3.2, 9.0, 15.0))),
        steps(*every_second(1, 20)),
    )
    labels = placed(deaths(report(many).line.kills, 20.0), 20.0, pixels=700.0)
    assert [(label.text, label.level) for label in labels] == [
        ("ranks 0, 1", 0),
        ("rank 2", 1),
        ("rank 3", 0),
        ("rank 4", 0),
    ]
    crowd = run(*(kill(0.2 * rank, rank) for rank in range(40)), steps(*every_second(1, 20)))
    assert all("rank" not in mark.label for mark in deaths(report(crowd).line.kills, 20.0))


def test_evaluations_and_checkpoints_are_marked_and_are_no_gaps():
    evaluation = {"time": T + 14.0, "event": "evaluation", "step": 10, "values": {"auc": 0.5}}
    written = {"step": 10, "kind": "full", "rows": 9, "bytes": 99, "stall_seconds": 0.5}
    checkpoint = {"time": T + 11.0, "event": "checkpoint", "seconds": 0.5, **written}
    record = run(
        steps(*every_second(1, 10)),
        checkpoint,
        evaluation,
        steps(*every_second(11, 20, shift=4)),
    )
    found = report(record)
    pauses = [(each.kind, each.begin, each.end) for each in found.line.pauses]
    assert pauses == [("checkpoint", 10.5, 11.0), ("evaluation", 11.0, 14.0)], (
        "the evaluation begins after the checkpoint of the same step"
    )
    chart = throughput(found.line, found.unit)
    assert [(band.begin, band.end) for band in chart.bands] == [(10.5, 11.0), (11.0, 14.0)]
    html = page(found, {}, "")
    assert "</i>evaluation</li>" in html and "</i>checkpoint</li>" in html
    assert "</i>evaluation</li>" not in page(report(SURVIVED), {}, "")


def test_the_page_needs_nothing_else():
    found = report(SURVIVED, notes=["<b>"])
    html = page(found, {"versions": "ecrm 0.1.0 & more"}, "[data]\npath = 'x'")
    assert all(
        reference.startswith("data:")
        for reference in re.findall(r'(?:src|srcset|href)="([^"]*)', html)
    )
    assert (
        "://" not in html and "@import" not in html and "url(" not in html and "<script" not in html
    )
    assert (
        "Passed." in html
        and "1,234,567" in html
        and "&lt;b&gt;" in html
        and "ecrm 0.1.0 &amp; more" in html
    )
    failed = page(report(UNDISTURBED), {}, "")
    assert "Failed." in failed and "never happened: --kill 1@10:parity" in failed


def test_a_pause_in_which_all_was_laid_out_anew_is_in_the_text_the_page_and_the_json():
    disturbed = run(
        steps(*every_second(1, 10)),
        kill(10.2),
        failure(10.5, 10),
        resumed(13.0, 3.0),
        rebuilt(13.5, 3.0),
        reshaped(14.0, 12),
        steps(*every_second(11, 20, shift=2)),
    )
    report = make_report("tiny", BATCH, SCHEDULED, UNDISTURBED, disturbed)
    said = (
        "laid out anew over 3 servers (k=2 m=1) before step 12: "
        "training waited 0.25 s, 7,654,321 bytes were moved"
    )
    assert said in " ".join(as_text(report).split())
    assert said in page(report, {}, "")
    (found,) = to_dict(report)["reshapes"]
    assert (found["step"], found["seconds"], found["moved_bytes"], found["since_start"]) == (
        12,
        0.25,
        7654321,
        14.0,
    )
    assert to_dict(make_report("tiny", BATCH, SCHEDULED, UNDISTURBED, SURVIVED))["reshapes"] == []

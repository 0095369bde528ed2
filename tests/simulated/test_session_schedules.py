"""Sessions with random models under fault schedules, and broken ones that must be caught."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest

import ecrm.session.slot_work as slot_work
from ecrm.config.schema import ProtectionConfig
from ecrm.session.streams import StreamSource
from ecrm.testing.faults.without_undo import leave_updates_in_place
from ecrm.testing.simulate.promise import Violation
from ecrm.testing.simulate.schedule import draw
from ecrm.testing.simulate.seed_range import run_range
from ecrm.testing.simulate.seen import Seen, check_seen
from ecrm.testing.simulate.session_job import SessionJob
from ecrm.testing.simulate.session_parts import batch_of, left_out
from ecrm.testing.simulate.simulation import Failed, first_step, run_schedule

SEVEN = ProtectionConfig.__dataclass_fields__["name"].metadata["rule"].choices


def test_scripts_of_random_models_end_with_the_bits_of_undisturbed_ones():
    totals = run_range(range(1, 7), "sessions", jobs=1)
    print(totals)
    assert totals.deaths > 10 and totals.recoveries > 4 and totals.refused < 3
    least = {"dlrm": 2, "evaluations": 2, "a saved model": 1, "several row optimizers": 3}
    assert all(totals.mix[f"sessions with {what}"] >= count for what, count in least.items())


def test_a_seed_is_a_model_and_its_faults():
    assert draw(13, "sessions") == draw(13, "sessions") != draw(14, "sessions")
    assert run_schedule(draw(5, "sessions")) == run_schedule(draw(5, "sessions"))
    kinds = {draw(seed, "sessions").model.kind for seed in range(60)}
    assert kinds == {"mixed", "two-tower", "dlrm", "dcn", "projection", "deepfm"}


def test_steps_that_are_not_undone_are_caught():
    with pytest.raises(Failed) as caught:
        for seed in range(10, 20):
            run_schedule(draw(seed, "sessions"), leave_updates_in_place)
    assert caught.value.caught


def test_random_numbers_that_a_redone_step_draws_anew_are_caught(monkeypatch):
    monkeypatch.setattr(slot_work, "seed_slot", lambda seed, step, slot: None)
    with pytest.raises(Failed, match="was told that step") as caught:
        for seed in range(6):
            run_schedule(draw(seed, "sessions"))
    assert caught.value.caught


def seen(steps: int = 3, began: int = 0) -> Seen:
    logged = [(step, {0: {"loss": str(step / 2)}}) for step in range(began, steps)]
    return Seen(logged, {2: (0.5,)}, saved="digest", finished=True, holds=True)


def test_what_scripts_see_is_held_to_the_undisturbed_run():
    """Rank 0 began with the dense replica, rank 1 has got it later, rank 2 has died."""
    right = {0: seen(), 1: seen(began=2), 2: Seen(seen(steps=2).logged)}
    check_seen(right, seen(), first=(0, 2))
    check_seen({1: seen(began=2), 2: right[2]}, seen(), first=(0, 2))

    def wrong(change, message):
        changed = deepcopy(right)
        change(changed)
        with pytest.raises(Violation, match=message):
            check_seen(changed, seen(), first=(0, 2))

    wrong(lambda ranks: ranks[0].logged.pop(), r"rank 0 was told what steps \[0, 1\]")
    wrong(lambda ranks: ranks[0].logged.pop(0), r"rank 0 was told what steps \[1, 2\]")
    wrong(lambda ranks: ranks[2].logged.append(ranks[2].logged[0]), "in the order")
    wrong(lambda ranks: ranks[2].logged[0][1][0].update(loss="9.0"), "rank 2 was told that step 0")
    wrong(lambda ranks: ranks[1].evaluated.clear(), "rank 1 has evaluated")
    wrong(lambda ranks: ranks[2].evaluated.update({2: (0.6,)}), "rank 2: the evaluation after")
    wrong(lambda ranks: setattr(ranks[1], "saved", "other"), "rank 1 has saved another model")
    with pytest.raises(Violation, match=r"nobody was told what steps \[0, 1\]"):
        check_seen({1: right[1]}, seen(), first=())
    with pytest.raises(Violation, match=r"gave \(0.5,\), then \(0.6,\)"):
        seen().evaluate(2, (0.6,))


@pytest.mark.parametrize(
    ("seed", "what"),
    [(24, "a second run that goes on"), (34, "Streams")],
    ids=["one rank fails in the resume, another after it", "all streams ended before the resume"],
)
def test_runs_that_go_on(seed, what):
    verdict = run_schedule(draw(seed, "sessions"))
    assert verdict.deaths > 2 and verdict.refused is None
    assert verdict.mix[f"sessions with {what}"] == 1


def test_copies_of_rows_that_skipped_steps_ask_for_are_their_records():
    """The first step is skipped; trainers are sent initial values, which records do not hold."""
    drawn = draw(1110, "sessions")
    assert drawn.workload.protection == "replicate" and drawn.model.scales
    model = replace(drawn.model, loads="", checkpoints=0, stops=0)
    calm = replace(drawn, model=model, deaths=0, lost_touch=0.0)
    run_schedule(replace(calm, workload=replace(calm.workload, steps=3)))


def test_a_death_in_a_function_that_all_ranks_run_is_drawn_and_survived():
    verdict = run_schedule(draw(303, "sessions"))
    assert verdict.mix["deaths in every"] >= 1 and verdict.refused is None


def test_new_draws_are_there():
    models = [draw(seed, "sessions").model for seed in range(60)]
    kinds = {model.data for model in models}
    assert kinds == {"a function", "Indexed", "Streams"}
    assert all(
        sum(bool(getattr(model, name)) for model in models) > 4
        for name in ("epochs", "scales", "checkpoints", "stops")
    )


def test_what_half_of_the_seeds_have_is_drawn():
    schedules = [draw(seed, "sessions") for seed in range(300)]
    names = (
        "incremental",
        "copies",
        "loads",
        "schedules_rows",
        "evaluates_indexed",
        "reads",
        "checks",
    )
    for name in names:
        count = sum(bool(getattr(schedule.model, name)) for schedule in schedules)
        assert 10 < count < 100, name
    assert sum(schedule.later is not None for schedule in schedules) > 10
    assert {schedule.workload.protection for schedule in schedules} == set(SEVEN)
    assert any(
        {*model.bags[0].features}.intersection(*(table.features for table in model.sequences))
        for model in (schedule.model for schedule in schedules)
        if len(model.sequences) == 1
    )


@pytest.mark.parametrize("size", [2, 3, 6])
def test_scripts_that_skip_batches_train_most_batches(size):
    model = draw(13, "sessions").model
    skipped = [left_out(batch_of(model, step, 0, size=size)) for step in range(200)]
    assert 10 < sum(skipped) < 80


@pytest.mark.parametrize(
    ("began", "refused", "right"),
    [
        ({5}, set(), True),
        ({4}, set(), False),
        ({5, 4}, {5}, False),
        ({4}, {5}, True),
        ({2}, {5}, False),
        ({6}, {5}, False),
        ({4}, {3}, False),
    ],
)
def test_a_second_run_begins_before_the_last_checkpoint_if_that_is_nonfinite(
    tmp_path, began, refused, right
):
    before = SessionJob(draw(13, "sessions").model, tmp_path)
    before.kept, before.refused = {2, 4}, refused
    if right:
        assert {first_step(began, 5, before)} == began
    else:
        with pytest.raises(Violation, match="after 5 steps"):
            first_step(began, 5, before)


def test_states_of_streams_that_are_not_undone_are_caught(monkeypatch):
    monkeypatch.setattr(StreamSource, "_begun", _begun_anew(StreamSource._begun))
    with pytest.raises(Failed):
        for seed in STREAMS:
            run_schedule(draw(seed, "sessions"))


STREAMS = [s for s in range(6) if draw(s, "sessions").model.data == "Streams"]


def _begun_anew(begun):
    """A stream that is begun with a state forgets it."""
    return lambda self, step, slot, before: (
        begun(self, 0, slot, None) if step else begun(self, step, slot, before)
    )


@pytest.mark.drill
@pytest.mark.parametrize("seed", [145, 228, 269, 1110, 1402, 1622, 53005])
def test_a_schedule_that_has_found_a_defect_passes(seed):
    """They found modes, calls, copies and streams wrong after a failure, and false alarms."""
    run_range([seed], "sessions", jobs=1)

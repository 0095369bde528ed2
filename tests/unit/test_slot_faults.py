"""What ranks say of how others have ended in slots, and when user code is to blame for it."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from ecrm.base.errors import ScriptFailed
from ecrm.engine.events import SlotFailed
from ecrm.engine.inquest import Leaving
from ecrm.run.slot_faults import (
    BATCH,
    BEFORE_STEP,
    EVALUATION,
    EVERY,
    Fault,
    Place,
    ends_run,
    raised_before,
    together,
    together_in,
)
from ecrm.run.user_code import UserCode
from ecrm.run.whereabouts import Whereabouts

SLOT, NEXT = Place(7, 1), Place(8, 1)
SCORED = Place(7, 1, EVALUATION)
NOWHERE, UNKNOWN = Fault(()), Fault.unknown([1, 3])


def died(*places: Place) -> Fault:
    return Fault(places)


def raised(place: Place) -> Fault:
    return Fault((place,), error="ValueError: x")


def test_all_ranks_come_to_know_the_same_in_whatever_order_they_hear_it():
    said = [
        {4: UNKNOWN, 5: raised(SLOT)},
        {4: Fault.unknown([1, 2, 3]), 5: died(SLOT), 6: UNKNOWN},
        {4: Fault.unknown([3]), 6: NOWHERE},
        {},
    ]
    known = {
        4: Fault((Place(9, 3),), known=False),
        5: raised(SLOT),
        6: NOWHERE,
    }
    for order in itertools.permutations(said):
        assert together(order, 9, "forward") == known
    # what was agreed on before is not told otherwise later
    assert together([known, {4: UNKNOWN}], 12, "input") == known


def test_what_is_said_comes_through_as_json():
    for fault in (NOWHERE, UNKNOWN, raised(NEXT), died(SLOT, SCORED)):
        assert Fault.from_json(json.loads(json.dumps(fault.to_json()))) == fault


def test_code_that_kills_two_ranks_in_one_place_is_to_blame():
    told = ends_run({4: died(SLOT), 6: died(SLOT)})
    assert told.startswith("ranks 4, 6 died in step 7, slot 1, one after the other: the script")
    assert "ranks 3, 4 died in the batch of step 8" in ends_run(
        {3: died(Place(8, 1, BATCH)), 4: died(Place(8, 1, BATCH))}
    )
    told = ends_run({4: died(SCORED), 5: died(SCORED)})
    assert told.startswith("ranks 4, 5 died in batch 1 of an evaluation at step 7, one after")


def test_an_error_and_a_death_in_one_place_are_told_as_that():
    told = ends_run({4: raised(SLOT), 6: died(SLOT)})
    assert told.startswith("ValueError: x; rank 6 died in step 7, slot 1: the script kills")
    unknown = {rank: UNKNOWN.noticed_in(7, "lookup") for rank in (5, 6)}
    told = ends_run({4: raised(SLOT), **unknown})
    assert told.startswith("ValueError: x; ranks 5, 6 died in step 7, each running slot 1, one ")


def test_deaths_elsewhere_are_nobodys_fault():
    for others in (NOWHERE, died(NEXT), died(Place(7, 1, BATCH)), died(Place(7, 0)), UNKNOWN):
        assert not ends_run({4: died(SLOT), 6: others.noticed_in(7, "update")})


def test_where_nobody_knows_the_third_death_tells():
    unknown = {rank: UNKNOWN.noticed_in(7, "update") for rank in (4, 5)}
    assert not ends_run(unknown)
    assert not ends_run({**unknown, 6: UNKNOWN.noticed_in(8, "update")})
    assert not ends_run({**unknown, 6: Fault.unknown([2]).noticed_in(7, "update")})
    assert "ranks 4, 5, 6 died in step 7, each running slot 1, one after the other" in ends_run(
        {**unknown, 6: Fault.unknown([1, 2]).noticed_in(7, "update")}
    )
    assert ends_run({**unknown, 6: died(SLOT)})


@pytest.mark.parametrize("phase", ["evaluate", "save", "finish", "checkpoint", "commit", "start"])
def test_where_no_slot_is_computed_none_is_to_blame(phase):
    said = [dict.fromkeys((4, 5, 6), UNKNOWN)]
    assert ends_run(together(said, 7, "forward"))
    assert together(said, 7, phase) == dict.fromkeys((4, 5, 6), NOWHERE)


def test_a_batch_of_an_evaluation_is_no_slot():
    unknown = {rank: UNKNOWN.noticed_in(7, "update") for rank in (4, 5)}
    assert not ends_run({**unknown, 6: died(SCORED)})


@pytest.mark.parametrize("part, where", [(BEFORE_STEP, "before_step of"), (EVERY, "every at")])
def test_what_all_ranks_run_is_to_blame_for_deaths_one_after_the_other_alone(part, where):
    first, second = Place(7, 0, part), Place(7, 1, part)
    told = ends_run({4: died(first), 5: died(second)})
    assert told.startswith("ranks 4, 5 died in ") and f"{where} step 7, one after" in told
    assert not ends_run({4: died(first), 5: died(first)}), "killed together, by whatever it was"
    assert not ends_run({4: died(first), 5: died(Place(8, 1, part)), 6: UNKNOWN, 3: died(SLOT)})
    assert together_in({4: died(first), 5: died(first), 6: died(SLOT)}, [4, 5, 6]) == (
        f" (ranks 4, 5 died in {first}, the script's own code)"
    )
    assert not together_in({4: died(SLOT)}, [4, 5])


def test_an_error_is_tried_elsewhere_once_and_not_soon_again():
    assert not raised_before({4: raised(SLOT)}, 4)
    assert not raised_before({4: raised(SLOT), 5: died(NEXT), 6: UNKNOWN}, 4)
    assert raised_before({4: raised(SLOT), 5: raised(SLOT)}, 5) == "as on rank 4 before"
    assert raised_before({4: died(SLOT), 5: raised(SLOT)}, 5) == "rank 4 died there"
    other = raised_before({4: raised(NEXT), 5: raised(SLOT)}, 5)
    assert other == "rank 4 failed in step 8, slot 1, too"
    assert not raised_before({4: raised(Place(200, 1)), 5: raised(SLOT)}, 5)


def heard(ranks: list[UserCode], dead: dict[int, tuple[int, ...]]) -> list[Leaving | None]:
    """The judgements of all ranks on deaths in step 7."""
    findings = [rank.find(dead) for rank in ranks]
    return [rank.hear(findings, 7, "forward", [0, 1]) for rank in ranks]


def test_ranks_judge_alike_by_all_findings():
    knows, guesses = UserCode(lambda rank: (SLOT,)), UserCode(lambda rank: None)
    guesses.seals = 3
    for rank in (knows, guesses):
        rank.begin()
    assert heard([knows, guesses], {4: (1, 2)}) == [None, None]
    assert knows.faults == guesses.faults == {4: died(SLOT)}
    assert knows.seals == guesses.seals == 3
    told = SlotFailed(rank=4, step=7, slot=1, part="body", error=None)
    assert knows.events([4, 5]) == guesses.events([4, 5]) == [told]


def test_an_error_has_its_rank_leave_in_the_next_recovery():
    rank, other = UserCode(), UserCode()
    engine = SimpleNamespace(rank=0, recovery=SimpleNamespace(recover=rank.begin))
    with pytest.raises(AssertionError, match="a recovery went on"):
        rank.leave(engine, SLOT, "ValueError: x")
    leaving, of_other = heard([rank, other], {})
    assert leaving == of_other == Leaving({0: "ValueError: x"}, "", True, ScriptFailed)
    error = leaving.ending("no rank is left")
    assert (str(error), error.speaker) == ("ValueError: x (no rank is left)", 0)


def test_a_suspicion_of_one_recovery_counts_no_more_in_the_next():
    guesses = UserCode(lambda rank: None)
    guesses.begin()
    guesses.hear([guesses.find({4: (1,)})], 7, "save", [0])  # where no slot was computed
    assert guesses.faults == {}
    guesses.begin()
    guesses.hear([guesses.find({})], 8, "forward", [0])
    assert guesses.faults == {}


def test_a_rank_that_died_has_left_where_user_code_was():
    word = np.zeros(1, np.int64)
    places = [Place(0, 0), Place(0, 0, BATCH), Place(10**9, (1 << 28) - 1, EVERY), SLOT]
    for place in places:
        Whereabouts(0, word, {}).enter(place)
        assert Whereabouts(0, word, {3: word.copy()}).place_of_dead(3) == (place,)
    Whereabouts(0, word, {}).enter(None)
    others = Whereabouts(0, word, {3: word.copy()})
    assert others.place_of_dead(3) == ()
    assert others.place_of_dead(3) is others.place_of_dead(4) is None

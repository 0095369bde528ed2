"""What ranks say of how others have ended in slots, and when user code is to blame for it."""

import itertools
import json

import numpy as np

from ecrm.engine.slot_faults import Fault, Place, deadly, raised_before, together
from ecrm.rank.whereabouts import Whereabouts

BODY, NEXT = Place(7, 1), Place(8, 1)
NOWHERE, UNKNOWN = Fault(()), Fault.unknown([1, 3])


def died(*places: Place) -> Fault:
    return Fault(places)


def raised(place: Place) -> Fault:
    return Fault((place,), error="ValueError: x")


def test_all_ranks_come_to_know_the_same_in_whatever_order_they_hear_it():
    said = [
        {4: UNKNOWN, 5: raised(BODY)},
        {4: Fault.unknown([1, 2, 3]), 5: died(BODY), 6: UNKNOWN},
        {4: Fault.unknown([3]), 6: NOWHERE},
        {},
    ]
    known = {
        4: Fault((Place(9, 3),), known=False),
        5: raised(BODY),
        6: NOWHERE,
    }
    for order in itertools.permutations(said):
        assert together(order, 9) == known
    # what was agreed on before is not told otherwise later
    assert together([known, {4: UNKNOWN}], 12) == known


def test_what_is_said_comes_through_as_json():
    for fault in (NOWHERE, UNKNOWN, raised(NEXT), died(BODY, Place(9, 0, batch=True))):
        assert Fault.from_json(json.loads(json.dumps(fault.to_json()))) == fault


def test_code_that_kills_two_ranks_in_one_place_is_to_blame():
    told = deadly({4: died(BODY), 6: died(BODY)})
    assert told.startswith("ranks 4, 6 died in step 7, slot 1, one after the other: the script")
    assert "ranks 3, 4 died in the batch of step 8" in deadly(
        {3: died(Place(8, 1, True)), 4: died(Place(8, 1, True))}
    )
    assert deadly({4: raised(BODY), 6: died(BODY)})


def test_deaths_elsewhere_are_nobodys_fault():
    for others in (NOWHERE, died(NEXT), died(Place(7, 1, batch=True)), died(Place(7, 0)), UNKNOWN):
        assert not deadly({4: died(BODY), 6: others.noticed_in(7)})


def test_where_nobody_knows_the_third_death_tells():
    unknown = {rank: UNKNOWN.noticed_in(7) for rank in (4, 5)}
    assert not deadly(unknown)
    assert not deadly({**unknown, 6: UNKNOWN.noticed_in(8)})
    assert not deadly({**unknown, 6: Fault.unknown([2]).noticed_in(7)})
    assert "ranks 4, 5, 6 died in step 7, one after the other, each running slot 1" in deadly(
        {**unknown, 6: Fault.unknown([1, 2]).noticed_in(7)}
    )
    assert deadly({**unknown, 6: died(BODY)})


def test_an_error_is_tried_elsewhere_once_and_not_soon_again():
    assert not raised_before({4: raised(BODY)}, 4)
    assert not raised_before({4: raised(BODY), 5: died(NEXT), 6: UNKNOWN}, 4)
    assert raised_before({4: raised(BODY), 5: raised(BODY)}, 5) == "as on rank 4 before"
    assert raised_before({4: died(BODY), 5: raised(BODY)}, 5) == "rank 4 died there"
    other = raised_before({4: raised(NEXT), 5: raised(BODY)}, 5)
    assert other == "rank 4 failed in step 8, slot 1, too"
    assert not raised_before({4: raised(Place(200, 1)), 5: raised(BODY)}, 5)


def test_a_rank_that_died_has_left_where_user_code_was():
    word = np.zeros(1, np.int64)
    places = [Place(0, 0), Place(0, 0, batch=True), Place(10**9, (1 << 20) - 1, batch=True), BODY]
    for place in places:
        Whereabouts(word, {}).be_at(place)
        assert Whereabouts(word, {3: word.copy()}).when_dead(3) == (place,)
    Whereabouts(word, {}).be_at(None)
    others = Whereabouts(word, {3: word.copy()})
    assert others.when_dead(3) == ()
    assert others.when_dead(3) is others.when_dead(4) is None

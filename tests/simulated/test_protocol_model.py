"""The model of commit, undo, recovery, membership and joins, with all of its states visited."""

from __future__ import annotations

import pytest

from support.explorer import explore
from support.protocol_model import (
    DEAD,
    DONE,
    ENTER,
    FINISH,
    MISTAKES,
    SPREAD_AGREE,
    WELCOME,
    Model,
)

RETURNS = {"deaths": 1, "returns": 1}
DIES, PARTS, FAILS = {"deaths": 1}, {"cuts": 1}, {"failures": 1}
FOUND_WITH = {
    "rows are not undone": DIES,
    "parity is not undone": DIES,
    "undo forgets to empty the log": DIES,
    "commit before the agreement": DIES,
    "a missed commit is undone": DIES,
    "the oldest commit counts": DIES,
    "an agreement waits for nobody": DIES,
    "roles by hearsay": {"deaths": 2},
    "rows decoded in an undone step stay": DIES | FAILS,
    "units of an uncommitted step": DIES,
    "the head does not wait for a fenced rank": PARTS,
    "the head is less patient than the lease": PARTS,
    "the next epoch begins without some": DIES,
    "both ends of a cut are fenced": PARTS,
    "nobody is fenced": PARTS,
    "a leave is not told": DIES,
    "no revocation": FAILS,
    "a death is not told": DIES,
    "a number returns in the epoch of its death": RETURNS,
    "ranks join in a broken recovery": {"deaths": 2, "returns": 1},
    "a newcomer has a replica of its own": RETURNS,
    "a late death counts again": RETURNS,
}
"""The smallest faults with which a mistake is found."""

ENOUGH = 60_000
"""More states than any of these models has until the mistake is found."""


def model(mistake: str = "", **faults: int) -> Model:
    return Model(mistake=mistake, **({"deaths": 0, "cuts": 0} | faults))


@pytest.mark.parametrize(
    "faults, states",
    [
        pytest.param({}, 61, id="calm"),
        pytest.param(DIES, 2_913, id="a death"),
        pytest.param(
            {"deaths": 1, "ranks": 3, "survives": 1, "cuts": 1},
            0,
            id="three ranks",
            marks=pytest.mark.drill,
        ),
        pytest.param({"deaths": 2}, 0, id="two deaths"),
        pytest.param(RETURNS | {"spares": 1}, 0, id="a return beside a spare"),
        pytest.param(
            RETURNS | {"steps_to_train": 2},
            14_898,
            id="a return, then a step",
            marks=pytest.mark.drill,
        ),
        pytest.param(
            {"deaths": 2, "returns": 1},
            160_240,
            id="two deaths, a return",
            marks=pytest.mark.drill,
        ),
        pytest.param(RETURNS | FAILS, 0, id="a return and a failed call", marks=pytest.mark.drill),
        pytest.param(PARTS, 0, id="a cut", marks=pytest.mark.drill),
        pytest.param(DIES | FAILS, 0, id="a death and a failed call", marks=pytest.mark.drill),
        pytest.param(
            {"deaths": 2, "failures": 1}, 0, id="two deaths, a failed call", marks=pytest.mark.drill
        ),
        pytest.param(DIES | PARTS, 0, id="a death and a cut", marks=pytest.mark.drill),
    ],
)
def test_no_state_breaks_a_promise(faults, states):
    found = explore(model(**faults), 2_000_000)
    print(found)
    assert not found.wrong, found
    assert found.ends
    assert not states or found.states == states


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(each, marks=pytest.mark.drill)
        if FOUND_WITH[each] in (DIES | FAILS, {"deaths": 2}, {"deaths": 2, "returns": 1})
        else each
        for each in MISTAKES
    ],
)
def test_a_mistake_in_the_protocol_is_found(mistake):
    found = explore(model(mistake, **FOUND_WITH[mistake]), ENOUGH)
    assert found.wrong and found.way
    assert mistake in MISTAKES


def test_the_way_to_a_mistake_is_the_shortest():
    found = explore(model("no revocation", **FAILS))
    assert found.wrong == "nobody can go on" and len(found.way) == 4
    assert sum("fails alone" in label for label in found.way) == 1, found.way


class TwoLocks:
    """A textbook's model: two processes take two locks, in the same order or in opposite orders.

    A process is at 0, at 1 with the first of its locks, at 2 with both, and at 3 at its end.
    """

    def __init__(self, opposite: bool) -> None:
        self._order = ("ab", "ba" if opposite else "ab")

    def start(self):
        return 0, 0

    def steps(self, at):
        held = [self._order[who][: at[who] % 3] for who in (0, 1)]
        for who in 0, 1:
            wanted = self._order[who][at[who]] if at[who] < 2 else ""
            if at[who] < 3 and (not wanted or wanted not in held[1 - who]):
                yield f"{who} goes on", tuple(at[each] + (each == who) for each in (0, 1))

    def wrong(self, at):
        return ""

    def wrong_step(self, before, after):
        return ""

    def progress(self, at):
        return sum(at)

    def ended(self, at):
        return at == (3, 3)


def test_the_checker_counts_states_and_finds_the_deadlock_of_a_textbook():
    """Of 16 pairs of places four have the first lock twice."""
    right, wrong = explore(TwoLocks(opposite=False)), explore(TwoLocks(opposite=True))
    assert (right.states, right.ends, right.wrong) == (12, 1, "")
    assert wrong.wrong == "nobody can go on" and len(wrong.way) == 2


def test_a_returned_rank_joins_and_is_welcomed():
    """Some state of the model with a return has each call of a join."""
    bounded, seen = model(**RETURNS), set()

    class Watched:
        def __getattr__(self, name):
            return getattr(bounded, name)

        def wrong(self, state):
            seen.update(this.at for this in state.ranks if this.life)
            return bounded.wrong(state)

    found = explore(Watched())
    assert not found.wrong and found.states == 8_549
    assert seen >= {ENTER, WELCOME, SPREAD_AGREE, FINISH, DONE}


def test_a_rank_that_returns_over_a_cut_link_is_lost_again_alone():
    """Some state of the model has the second loss, and no state a loss of the other end."""
    bounded, lost = model(**PARTS, returns=1), set()

    class Watched:
        def __getattr__(self, name):
            return getattr(bounded, name)

        def wrong(self, state):
            if state.cut and state.cut.other < len(state.ranks):
                ends = (state.ranks[state.cut.one], state.ranks[state.cut.other])
                if sum(this.life for this in ends):
                    lost.add(tuple((this.life, this.at == DEAD) for this in ends))
            return bounded.wrong(state)

    found = explore(Watched())
    assert not found.wrong
    assert lost == {((0, False), (1, False)), ((0, False), (1, True))}

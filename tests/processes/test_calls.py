"""A rank counts as stuck while its next call to others is awaited."""

from __future__ import annotations

from ecrm.process.calls import CallCount, Stuck


def test_a_rank_is_stuck_outside_of_calls_where_the_next_one_is_awaited():
    now = [0.0]
    calls = CallCount()
    stuck = Stuck(calls, 5.0, lambda: now[0])

    def after(seconds: float) -> bool:
        now[0] += seconds
        return stuck.look()

    assert not after(9)  # no call yet
    with calls.call():
        assert not after(0) and not after(9)
    assert not after(0) and after(6)
    calls.awaited = False
    assert not after(0) and not after(99)
    calls.awaited = True
    assert not after(0) and not after(4) and after(1)

"""The choice of rows rebuilt beside a step, on made-up times of steps."""

from __future__ import annotations

import random
import statistics

import pytest

from ecrm.protection.rebuild_pace import LEAST_ROWS, MOST_BYTES, PERIOD, WINDOW, RebuildPace

RECORD = 264


def paces(pace, steps, seconds_of_row, calm=0.1, noise=0.0, first=0, usual=None):
    """Shares of the usual pace kept in steps, window by window, and the rows of each step.

    `usual` is the time of a step without rebuilding, by default the time of a `calm` step.
    """
    chance, kept, rows, spent = random.Random(1), [], [], 0.0
    for step in range(first, first + steps):
        rows.append(pace.rows(step))
        seconds = (calm + rows[-1] * seconds_of_row) * (1 + noise * chance.uniform(-1, 1))
        pace.stepped(step, seconds)
        spent += seconds
        if (step + 1) % WINDOW == 0:
            kept.append(WINDOW * (usual or calm) / spent)
            spent = 0.0
    return kept, rows


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("asked", [0.0, 0.01, 0.02])
def test_rows_asked_for_by_steps_are_in_the_share(asked, noise):
    """The usual pace is of steps before the failure. Their share is kept, not more and not less."""
    pace, chance = RebuildPace(0.05, 0, RECORD), random.Random(2)
    for _ in range(50):
        pace.undisturbed(0.1 * (1 + noise * chance.uniform(-1, 1)))
    calm = 0.1 * (1 + asked)
    kept, _ = paces(pace, 200 * WINDOW, 2e-6, calm=calm, noise=noise, usual=0.1)
    assert statistics.fmean(kept[20:]) == pytest.approx(0.95, abs=0.015 if noise else 0.004)


@pytest.mark.parametrize("usual", [0.05, 0.08, 0.095])
def test_a_rebuild_goes_on_beside_steps_that_stay_slow(usual):
    """Half of the share is for background rows, however many rows the steps ask for."""
    pace = RebuildPace(0.05, 0, RECORD)
    for _ in range(50):
        pace.undisturbed(usual)
    kept, rows = paces(pace, 20 * WINDOW, 2e-6, usual=usual)
    half = 0.5 * 0.05 / 0.95
    assert kept[-1] == pytest.approx(usual / (0.1 * (1 + half)), rel=0.005)
    assert statistics.fmean(rows[-WINDOW:]) * 2e-6 == pytest.approx(0.1 * half, rel=0.05)


def test_a_machine_faster_than_before_the_failure_gives_no_more_than_the_share():
    pace = RebuildPace(0.05, 0, RECORD)
    pace.undisturbed(0.2)
    kept, _ = paces(pace, 12 * WINDOW, 2e-6)
    assert kept[-1] == pytest.approx(0.95, rel=0.005)


@pytest.mark.parametrize("seconds_of_row", [1e-9, 1e-7, 2e-6, 1e-5])
@pytest.mark.parametrize("share", [0.02, 0.05, 0.3])
def test_steps_keep_the_share_that_is_not_for_rebuilding(share, seconds_of_row):
    """From a pace far too slow or far too fast, within a few windows."""
    kept, rows = paces(RebuildPace(share, 0, RECORD), 12 * WINDOW, seconds_of_row)
    most = MOST_BYTES // RECORD
    if LEAST_ROWS < max(rows[-PERIOD:]) < most:
        assert kept[-1] == pytest.approx(1 - share, rel=0.005)
    else:
        assert max(rows[-PERIOD:]) == most and kept[-1] > 1 - share


def test_noise_of_ten_percent_leaves_the_pace_near_the_share():
    kept, _ = paces(RebuildPace(0.05, 0, RECORD), 200 * WINDOW, 2e-6, noise=0.1)
    assert statistics.fmean(kept[20:]) == pytest.approx(0.95, abs=0.02)


def test_rows_chosen_a_step_ahead_count_as_well():
    """Two thirds of the work is done in the step before the rows come."""
    pace, spent = RebuildPace(0.05, 0, RECORD), []
    for step in range(20 * WINDOW):
        seconds = 0.1 + 1e-6 * pace.rows(step) + 2e-6 * pace.rows(step + 1)
        pace.stepped(step, seconds)
        spent.append(seconds)
    last = spent[-4 * WINDOW :]
    assert 0.1 * len(last) / sum(last) == pytest.approx(0.95, rel=0.005)


def test_a_slower_row_takes_fewer_rows():
    pace = RebuildPace(0.05, 0, RECORD)
    paces(pace, 10 * WINDOW, 1e-6)
    fast = max(map(pace.rows, range(PERIOD)))
    kept, rows = paces(pace, 10 * WINDOW, 1e-5)
    assert max(rows[-PERIOD:]) < fast / 5 and kept[-1] == pytest.approx(0.95, rel=0.005)


def test_two_steps_in_six_are_without_rows_on_every_rank():
    pace = RebuildPace(0.05, 100, RECORD)
    assert [pace.rows(step) for step in range(12)] == [100, 100, 100, 100, 0, 0] * 2


def test_the_bound_holds_and_a_rebuild_never_stands_still():
    bound = RebuildPace(0.05, 500, RECORD)
    _, rows = paces(bound, 10 * WINDOW, 0.0)
    assert max(rows) == 500
    _, rows = paces(RebuildPace(0.05, 0, RECORD), 30 * WINDOW, 1.0)
    assert max(rows[-PERIOD:]) == LEAST_ROWS
    _, rows = paces(RebuildPace(0.05, 7, RECORD), 30 * WINDOW, 1.0)
    assert max(rows[-PERIOD:]) == 7


def test_with_a_share_of_1_every_step_takes_the_bound():
    pace = RebuildPace(1.0, 300, RECORD)
    _, rows = paces(pace, 5 * WINDOW, 1.0)
    assert set(rows) == {300}
    assert RebuildPace(1.0, 0, RECORD).rows(3) == MOST_BYTES // RECORD


def test_a_step_with_a_recovery_changes_nothing():
    pace = RebuildPace(0.05, 0, RECORD)
    for step in range(10 * WINDOW):
        if step % 5 == 0:
            pace.interrupted()
        pace.stepped(step, 100.0 if pace.rows(step) else 0.1)
    assert pace.rows(0) == RebuildPace(0.05, 0, RECORD).rows(0)

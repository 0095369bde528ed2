"""The simulator's scripts that hide state are refused, each kind of it; without it they train."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ecrm.model.determinism import prepared_torch
from ecrm.testing.simulate.hidden_state import HIDDEN
from ecrm.testing.simulate.schedule import draw
from ecrm.testing.simulate.session_job import SessionJob
from ecrm.testing.simulate.simulation import Failed, check_hidden_state


def check(tmp_path, hides):
    drawn = (draw(seed, "sessions") for seed in itertools.count())
    schedule = next(each for each in drawn if each.model is not None and each.model.hides)
    model = replace(schedule.model, loads="", skips=False, checks=1)
    with prepared_torch(threads=1):
        check_hidden_state(schedule.workload, SessionJob(model, tmp_path, hides=hides))


@pytest.mark.parametrize("kind", HIDDEN)
def test_hidden_state_is_refused(tmp_path, kind):
    check(tmp_path, kind)


def test_a_script_without_hidden_state_trains_and_the_check_says_so(tmp_path):
    with pytest.raises(Failed, match="hidden on its model was trained"):
        check(tmp_path, "")

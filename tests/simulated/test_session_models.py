"""TorchRec's own models, unmodified, in a session: kills change no bit of them."""

from __future__ import annotations

import functools

import pytest

from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault
from support.programs.torchrec_models import MODELS, train
from support.sessions import Layout, Left, Train, run

STEPS = 6


def script(name: str) -> Train:
    def trained(start) -> Session:
        session, logged = train(name, STEPS, start=start)
        session.delivered = list(logged.items())
        return session

    return trained


@functools.cache
def calm(name: str) -> Left:
    return run(train=script(name))


@pytest.mark.parametrize("name", MODELS)
def test_a_server_and_a_trainer_die_and_no_bit_changes(name):
    left = calm(name)
    assert left.mismatches == left.deaths == 0 and len(left.logged) == STEPS
    for faults in (
        [PhaseFault(1, 3, "update")],
        [PhaseFault(4, 2, "forward")],
        [PhaseFault(2, 1, "parity"), PhaseFault(5, 4, "dense")],
    ):
        killed = run(faults, Layout(spares=2), script(name))
        assert killed.deaths == len(faults) and killed.mismatches == 0
        assert (killed.tables, killed.dense) == (left.tables, left.dense)
        assert killed.logged == left.logged[-len(killed.logged) :]


def test_models_and_steps_change_what_comes_out():
    assert len({tuple(calm(name).tables.values()) for name in MODELS}) == len(MODELS)

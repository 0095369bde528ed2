"""Functions between steps: their changes last, or are put back and told, whoever dies meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated.test_session_stop import batch_of, layout, trained
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault
from support.sessions import Left, run

DEATHS = [
    [PhaseFault(1, 5, "update")],
    [PhaseFault(3, 4, "evaluate")],
    [PhaseFault(3, 6, "forward"), PhaseFault(0, 8, "evaluate")],
]
STEPS = 10


def evaluated(session: Session) -> None:
    for batch in session.eval_batches([batch_of(90, n) for n in range(3)]):
        session.gather(score=session.model(batch["ids"]))


def slows_down(session: Session) -> None:
    @session.every(4)
    def slower() -> None:
        for group in session._replica.optimizer.param_groups:
            group["lr"] *= 0.5
        evaluated(session)


def by_chance(session: Session) -> None:
    """Reports a value of some samples, drawn at random."""

    @session.every(2)
    def of_some() -> None:
        before = torch.randperm(15)[:4]
        evaluated(session)
        after = torch.randperm(15)[:4]
        session.report(float(session.gathered["score"][torch.cat([before, after])].sum()))


def left(faults: Any, prepare: Callable[[Session], None], interval: int = 1, **given: Any) -> Left:
    return run(faults, layout(interval), trained(prepare=prepare, steps=STEPS, **given))


def plateau(optimizer: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.7, patience=0)


@pytest.mark.parametrize("interval", [1, 3])
def test_a_learning_rate_that_a_function_changes_lasts(interval):
    calm = left((), slows_down, interval)
    assert calm.dense != left((), lambda session: None, interval).dense
    for faults in DEATHS:
        killed = left(faults, slows_down, interval)
        assert killed.deaths == len(faults)
        assert (killed.tables, killed.dense) == (calm.tables, calm.dense), faults


def test_random_numbers_in_a_function_are_the_same_in_each_call():
    calm = left((), by_chance, scheduler=plateau)
    for faults in DEATHS:
        killed = left(faults, by_chance, scheduler=plateau)
        assert (killed.tables, killed.dense) == (calm.tables, calm.dense), faults


def test_a_buffer_that_a_function_changes_is_put_back_and_told(capsys):
    def zeroes(session: Session) -> None:
        @session.every(4)
        def look() -> None:
            session.model.layers[0].running_mean.zero_()

    calm = left((), zeroes)
    assert (calm.tables, calm.dense) == (
        left((), lambda session: None).tables,
        left((), lambda session: None).dense,
    )
    said = "! a function for session.every has changed buffer layers.0.running_mean, which is put"
    assert capsys.readouterr().out.count(said) == 1


def test_a_count_in_a_function_that_is_called_again_is_told(capsys):
    def counts(session: Session) -> None:
        session.model.calls, bad = 0, [0]

        @session.every(4)
        def look() -> None:
            session.model.calls += 1
            bad[0] += 1
            evaluated(session)

    left(DEATHS[1], counts)
    assert "is called again after a failure, and has changed bad[0], " in capsys.readouterr().out

"""Slots that are computed twice at the start: what differs is named, and nothing is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ecrm.base.errors import UsageError
from ecrm.run.lone_run import run_alone
from ecrm.run.started import Started, Wanted
from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault, ProgramFailed
from support.sessions import Train, run, train_two_tower

CHECKED, STEPS = 3, 5


def checking(prepare: Callable[[Session], None] = lambda session: None) -> Train:
    def train(start: Callable[[Wanted], Any]) -> Session:
        def begin(wanted: Wanted) -> Started:
            return replace(start(wanted), check_steps=CHECKED)

        return train_two_tower(begin, STEPS, prepare)

    return train


@pytest.mark.parametrize("faults", [[], [PhaseFault(4, 2, "update")]], ids=["calm", "killed"])
def test_what_is_computed_twice_trains_to_the_same_bits(faults):
    passes: Counter[int] = Counter()

    def count(session: Session) -> None:
        def passed(*_: object) -> None:
            passes[session.step] += 1

        session.model.register_forward_hook(passed)

    left = run(faults, train=checking(count))
    calm = run(train=lambda start: train_two_tower(start, STEPS))
    assert left.deaths == len(faults)
    assert (left.tables, left.dense, left.logged) == (calm.tables, calm.dense, calm.logged)
    if not faults:
        assert passes == {0: 6, 1: 6, 2: 6, 3: 2, 4: 2}  # twice, and on another rank


@pytest.mark.parametrize("steps, last", [(5, 2), (2, 1), (1, 0)])
def test_the_steps_that_were_computed_twice_are_told(capsys, monkeypatch, steps, last):
    monkeypatch.setattr("ecrm.run.lone_run.prepare_torch", lambda threads: None)

    def begin(wanted: Wanted) -> Started:
        return replace(run_alone(wanted), check_steps=CHECKED)

    train_two_tower(begin, steps)
    said = capsys.readouterr().out
    assert f"each slot of steps 0 to {last} was computed twice, to the same bits" in said


class Drift:
    """A number that is another one each time that it is asked for."""

    def __init__(self) -> None:
        self.number = 1.0

    def __call__(self) -> float:
        self.number *= 1.01
        return self.number


def outputs(session: Session) -> None:
    drift = Drift()
    session.model.register_forward_hook(lambda _, given, scores: scores * drift())


def rows(session: Session) -> None:
    drift = Drift()

    def before(_: object, given: tuple[torch.Tensor, ...]) -> None:
        given[0].register_hook(lambda gradient: gradient * drift())

    session.model.norm.register_forward_pre_hook(before)


def sometimes(session: Session) -> None:
    """A gradient that is zeros, and each second time is not there."""
    drift = Drift()

    def after(bias: torch.Tensor) -> None:
        bias.grad = torch.zeros_like(bias) if drift() == 1.01 else None

    session.model.norm.bias.register_post_accumulate_grad_hook(after)


def buffers(session: Session) -> None:
    drift = Drift()

    def after(norm: Any, given: object, out: object) -> None:
        norm.num_batches_tracked += int(100 * drift())

    session.model.norm.register_forward_hook(after)


WRONG = {
    r"step 0, slot . was computed twice, and the gradient of norm.weight differs, by": outputs,
    r"the gradient of \d+ rows of table ebc.embedding_bags.user, row \d+ first.* differs": rows,
    "was computed on rank ., too, and whether norm.bias has a gradient differs": sometimes,
    "buffer norm.num_batches_tracked differs: look for operations without a fixed order": buffers,
}


@pytest.mark.parametrize("told", WRONG)
def test_the_first_thing_that_differs_is_named(told):
    with pytest.raises(ProgramFailed) as failed:
        run(train=checking(WRONG[told]))
    error = next(iter(failed.value.errors.values()))
    assert "\n" not in str(error)
    with pytest.raises(UsageError, match=told):
        raise error
    run(train=lambda start: train_two_tower(start, 2, WRONG[told]))  # which nobody checks


def test_batches_that_ask_for_other_rows_are_told(monkeypatch):
    import support.sessions as sessions

    made, batch_of = Counter(), sessions.batch_of

    def other_each_time(step: int, slot: int) -> Any:
        made[step, slot] += 1
        return batch_of(step + 50 * made[step, slot], slot)

    monkeypatch.setattr(sessions, "batch_of", other_each_time)
    with pytest.raises(ProgramFailed) as failed:
        run(train=checking())
    assert any("asked for other rows" in str(e) for e in failed.value.errors.values())


def by_rank(session: Session) -> None:
    """Scores that are others on each rank."""
    session.model.register_forward_hook(lambda _, given, scores: scores + session.rank)


def batch_by_rank(session: Session) -> None:
    def before(_: object, given: tuple[torch.Tensor, ...]) -> None:
        session.log(rank=session.rank)

    session.model.norm.register_forward_pre_hook(before)


@pytest.mark.parametrize(
    "prepare, said",
    [
        (by_rank, "the gradient of [a-z0-9.]+ differs: leave out whatever depends on the rank"),
        (batch_by_rank, "what session.log was given differs"),
    ],
    ids=["scores", "a log"],
)
def test_code_that_depends_on_its_rank_is_found_on_another(prepare, said):
    with pytest.raises(ProgramFailed) as failed:
        run(train=checking(prepare))
    error = next(iter(failed.value.errors.values()))
    with pytest.raises(UsageError, match=f"step 0, slot . was computed on rank ., too, and {said}"):
        raise error
    run(train=lambda start: train_two_tower(start, 2, prepare))  # the canary: nobody checks

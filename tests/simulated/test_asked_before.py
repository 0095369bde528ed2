"""A slot that is done again with another batch than before ends the run, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ecrm.base.errors import ChangedDataError
from ecrm.protection.routing import MARK, ROWS
from ecrm.run.started import Wanted
from ecrm.session.asked_before import AskedBefore
from ecrm.session.batch_digest import batch_digest
from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault, ProgramFailed
from support.sessions import Batch, Layout, batch_of, run, two_tower

KILLED = [PhaseFault(4, 3, "forward")]
"""The main trainer dies once its slot has asked for rows of the step."""


def training(
    make: Callable[[np.random.Generator], Callable[[int, int], Batch]],
    check: int = 0,
    prepare: Callable[[Session], object] = lambda session: None,
    steps: int = 6,
):
    """A script whose batches a generator of each process takes part in."""

    def train(start: Callable[[Wanted], Any]) -> Session:
        torch.manual_seed(7)
        session = Session(
            two_tower(),
            slots=2,
            dense_optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-2),
            check_determinism=check,
            start=start,
        )
        session.delivered = []
        prepare(session)
        batches = make(np.random.default_rng(42))
        for batch in session.steps(batches, steps):
            session.model(batch.dense, batch.kjt).sum().backward()
        return session

    return train


def other_rows(own: np.random.Generator) -> Callable[[int, int], Batch]:
    return lambda step, slot: batch_of(step, slot + 1000 * int(own.integers(1 << 30)))


def other_numbers(own: np.random.Generator) -> Callable[[int, int], Batch]:
    def make(step: int, slot: int) -> Batch:
        batch = batch_of(step, slot)
        batch.dense += float(own.random())
        return batch

    return make


def counted(own: np.random.Generator) -> Callable[[int, int], Batch]:
    """A counter of the process in a label."""
    drawn = [0.0]

    def make(step: int, slot: int) -> Batch:
        batch = batch_of(step, slot)
        drawn[0] += 1
        batch.label[0] = drawn[0]
        return batch

    return make


MADE = {
    "rows": (other_rows, "has another batch"),
    "numbers": (other_numbers, "has another batch"),
    "a counter": (counted, "has another batch"),
}


SERVERS = [("forward", 3), ("update", 3), ("parity", 1), ("commit", 1)]
"""A server dies in a phase, with a commit interval: the trainers draw batches once more."""


@pytest.mark.parametrize(("phase", "interval"), SERVERS)
def test_a_trainer_that_draws_another_batch_after_a_servers_death_ends_the_run(phase, interval):
    with pytest.raises(ProgramFailed) as failed:
        run([PhaseFault(1, 3, phase)], Layout(commit_interval=interval), training(other_numbers))
    assert {type(error) for error in failed.value.errors.values()} == {ChangedDataError}


@pytest.mark.parametrize("name", MADE)
def test_a_slot_that_is_done_again_with_another_batch_ends_the_run(name):
    make, said = MADE[name]
    with pytest.raises(ProgramFailed) as failed:
        run(KILLED, train=training(make))
    errors = failed.value.errors
    assert len(errors) == Layout().world - 1
    assert {type(error) for error in errors.values()} == {ChangedDataError}
    (message,) = {str(error) for error in errors.values()}
    assert f"the slot {said} than before a failure: let its batch depend on step" in message


def test_without_the_comparison_another_model_comes_out(monkeypatch):
    """The canary: a batch with other numbers, and no word."""
    monkeypatch.setattr(AskedBefore, "problem", lambda *_: "")
    monkeypatch.setattr(AskedBefore, "drew", lambda *_: "")
    calm, killed = run(train=training(other_numbers)), run(KILLED, train=training(other_numbers))
    assert killed.deaths == 1 and killed.dense != calm.dense


def test_a_calm_run_of_such_a_script_is_not_disturbed():
    assert run(train=training(other_rows)).deaths == 0


def test_the_same_batch_again_ends_no_run():
    left = run(KILLED, train=training(lambda own: batch_of))
    assert left.deaths == 1 and left.dense == run(train=training(lambda own: batch_of)).dense


HEAD = (ROWS, 1, 0, 0)


def asked(*rows: int, mark: int = 7) -> dict[int, list[Any]]:
    return {4: [HEAD, torch.tensor(rows), (MARK, 1, mark), torch.empty(0)]}


def test_digests_are_kept_until_their_step_is_committed_or_the_layout_changes():
    known, layouts = AskedBefore(), ()
    assert known.problem(5, asked(1, 2), layouts) == known.problem(5, asked(1, 2), layouts) == ""
    assert "other rows" in known.problem(5, asked(1, 3), layouts)
    assert "other rows" in known.problem(5, asked(2, 1), layouts)
    assert "another batch" in known.problem(5, asked(1, 2, mark=8), layouts)
    assert known.problem(6, asked(1, 3), layouts) == ""
    known.forget(6)
    assert known.problem(5, asked(9), layouts) == ""
    assert known.problem(6, asked(4), [object()]) == ""  # type: ignore[list-item]


def test_a_batch_is_digested_whole_and_alike_everywhere():
    digest = batch_digest(batch_of(3, 1))
    again = batch_of(3, 1)
    again.kjt.to_dict()  # torchrec keeps what it computes in the batch
    assert batch_digest(again) == digest
    assert batch_digest(batch_of(3, 0)) != digest
    for change in (
        lambda batch: batch.label.neg_().add_(1),
        lambda batch: batch.dense[0].mul_(2),
        lambda batch: batch.kjt.weights()[-1].add_(1),
        lambda batch: batch.kjt.values()[0].add_(1),
        lambda batch: setattr(batch, "label", batch.label.double()),
        lambda batch: setattr(batch, "label", [1, "word"]),
        lambda batch: setattr(batch, "label", None),
    ):
        changed = batch_of(3, 1)
        change(changed)
        assert batch_digest(changed) != digest
    assert batch_digest({"a": np.arange(3)}) != batch_digest({"a": np.arange(3.0)})
    assert batch_digest([["x", 1.5]]) == batch_digest([["x", np.float64(1.5)]])


@pytest.mark.parametrize("interval", [1, 3])
def test_no_batch_is_drawn_past_a_function_that_changes_the_data(interval):
    """A server dies while rows are rebuilt, for which batches of two steps are drawn ahead."""

    def train(start: Callable[[Wanted], Any]) -> Session:
        epoch = [0]

        def every(session: Session) -> None:
            @session.every(4)
            def next_epoch() -> None:
                epoch[0] = session.step // 4

        def by_epoch(_: np.random.Generator) -> Callable[[int, int], Batch]:
            return lambda step, slot: batch_of(step + 100 * epoch[0], slot)

        return training(by_epoch, 0, every, 10)(start)

    at = Layout(commit_interval=interval)
    calm = run([], at, train)
    for fault in (
        PhaseFault(1, 5, "update"),
        PhaseFault(1, 6, "commit"),
        PhaseFault(1, 2, "dense"),
    ):
        killed = run([fault], at, train)
        assert (killed.tables, killed.dense) == (calm.tables, calm.dense), fault

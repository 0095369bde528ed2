"""Dense parts that differ between ranks end the run, and are named, before anything is saved."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ecrm.base.errors import ReplicasDiffer
from ecrm.engine.replica_check import FIRST_STEPS, ReplicaCheck
from ecrm.run.started import Wanted
from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault, ProgramFailed
from ecrm.transport.base import WORD_BITS
from ecrm.transport.digests import digest_of, entry_digests
from support.sessions import Layout, Train, run, train_two_tower

ODD, STEP = 4, 6
"""The rank whose dense part becomes another one, and the step in which it does."""


def on_odd_rank(change: Callable[[Session], object]) -> Train:
    """The script, whose optimizer, on one rank, does something else in one step."""

    def train(start: Callable[[Wanted], Any]) -> Session:
        def prepare(session: Session) -> None:
            optimizer = session._replica.optimizer
            assert optimizer is not None

            def changed(*_: object) -> None:
                if session.rank == ODD and session.step == STEP:
                    change(session)

            optimizer.register_step_post_hook(changed)

        return train_two_tower(start, prepare=prepare)

    return train


def flip(tensor: torch.Tensor) -> None:
    """Change the last bit of one number."""
    tensor.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def optimizer_of(session: Session) -> torch.optim.Optimizer:
    optimizer = session._replica.optimizer
    assert optimizer is not None
    return optimizer


CHANGES: dict[str, tuple[Callable[[Session], object], str]] = {
    "a bit of a weight": (
        lambda session: flip(session.model.mlp[0].weight),
        r"parameter mlp\.0\.weight differs",
    ),
    "a learning rate": (
        lambda session: optimizer_of(session).param_groups[0].update(lr=0.5),
        r"optimizer group 0\.lr is ",
    ),
    "optimizer state": (
        lambda session: flip(optimizer_of(session).state[session.model.mlp[0].bias]["exp_avg"]),
        r"optimizer state mlp\.0\.bias\.exp_avg differs",
    ),
    "a schedule": (
        lambda session: setattr(session._replica.scheduler, "last_epoch", 77),
        r"scheduler last_epoch is ",
    ),
}


def errors_of(train: Train, *faults: PhaseFault) -> str:
    """The one message of all ranks, each of which ends with ReplicasDiffer."""
    with pytest.raises(ProgramFailed) as failed:
        run(list(faults), train=train)
    errors = failed.value.errors
    assert len(errors) == Layout().world - len(faults)
    assert {type(error) for error in errors.values()} == {ReplicasDiffer}
    (message,) = {str(error) for error in errors.values()}
    return message


@pytest.mark.parametrize("name", CHANGES)
def test_a_dense_part_that_differs_on_a_rank_ends_the_run_at_that_commit(name):
    change, said = CHANGES[name]
    message = errors_of(on_odd_rank(change))
    assert f"after step {STEP + 1} the dense part of rank 5 is not that of rank 4: " in message
    assert re.search(said, message), message


def test_a_difference_is_told_whoever_dies_then():
    change, said = CHANGES["a learning rate"]
    assert re.search(said, errors_of(on_odd_rank(change), PhaseFault(0, STEP, "commit")))


def test_nothing_is_saved_of_replicas_that_differ(monkeypatch, tmp_path):
    """Also where no commit compares them."""
    monkeypatch.setattr(ReplicaCheck, "is_due", lambda self, step: False)
    differing = on_odd_rank(CHANGES["a bit of a weight"][0])

    def train(start: Callable[[Wanted], Any]) -> Session:
        session = differing(start)
        session.save(tmp_path / "model.pt")
        return session

    assert "parameter mlp.0.weight differs" in errors_of(train)
    assert not list(tmp_path.iterdir())


def test_without_the_comparison_a_difference_stays_unseen(monkeypatch):
    """The canary: two dense parts at the end, and no word."""
    monkeypatch.setattr(ReplicaCheck, "is_due", lambda self, step: False)
    monkeypatch.setattr("ecrm.engine.engine.compare_replicas", lambda *_: "")
    assert len(run(train=on_odd_rank(CHANGES["a bit of a weight"][0])).dense) == 2


def test_replicas_that_are_alike_end_no_run():
    assert len(run(train=on_odd_rank(lambda session: None)).dense) == 1


def test_a_buffer_changed_in_before_step_is_kept():
    def train(start: Callable[[Wanted], Any]) -> Session:
        def prepare(session: Session) -> None:
            session.model.register_buffer("seen", torch.zeros(()))
            session._replica.start_here()

            def before_step(parameters: object) -> None:
                session.model.seen += 1

            session._user_before_step = before_step

        session = train_two_tower(start, prepare=prepare)
        if session._engine.state.dense is not None:
            assert float(session.model.seen) == 10
        return session

    calm = run(train=train)
    left = run([PhaseFault(4, 4, "update"), PhaseFault(1, 6, "parity")], Layout(spares=2), train)
    assert left.deaths == 2 and left.dense == calm.dense and len(calm.dense) == 1


def test_a_digest_is_of_content_and_name_alone():
    wide = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    entries = [("a", wide), ("b", 0.1), ("c", None), ("d", "word"), ("e", torch.tensor(3))]
    digests = entry_digests(entries)
    turned = [("a", wide.t().contiguous().t()), *entries[1:]]
    assert entry_digests(turned) == digests
    assert digest_of(entry_digests(entries[::-1])) == digest_of(digests)
    others = [
        [("a", wide.reshape(6, 4)), *entries[1:]],
        [("a", wide.double()), *entries[1:]],
        [("a", -wide), *entries[1:]],
        [*entries[:1], ("b", 0.10000000000000002), *entries[2:]],
        [*entries[:1], ("b", None), ("c", 0.1), *entries[3:]],
        [("z", wide), *entries[1:]],
        entries[:-1],
    ]
    found = {digest_of(entry_digests(other)) for other in others}
    assert len(found) == len(others) and digest_of(digests) not in found


class Value(nn.Module):
    """A dense part of one entry, whose digest takes `seconds` of a clock."""

    def __init__(self, now: list[float], seconds: float) -> None:
        super().__init__()
        self._now, self._seconds = now, seconds

    @property
    def entries(self) -> list[tuple[str, object]]:
        self._now[0] += self._seconds
        return [("value", 1)]


@pytest.mark.parametrize("seconds, share", [(1e-6, 1.0), (1e-3, 1 / 32), (0.1, 1 / 2048)])
def test_digests_take_half_a_percent_of_a_step_at_most(seconds, share):
    now = [0.0]
    check, dense = ReplicaCheck(lambda: now[0]), Value(now, seconds)
    done = 0
    for step in range(3 * 4096):
        now[0] += 0.01
        check.stepped(0.01)
        done += check.word_if_due(dense, step) is not None  # type: ignore[arg-type]
    assert done == pytest.approx(share * 3 * 4096 + FIRST_STEPS, abs=FIRST_STEPS)


def test_words_of_two_states_differ_in_nearly_all_steps():
    check = ReplicaCheck(lambda: 0.0)

    class Of:
        def __init__(self, value: int) -> None:
            self.entries = [("value", value)]

    same = [check.word_if_due(Of(1), step) == check.word_if_due(Of(2), step) for step in range(999)]  # type: ignore[arg-type]
    assert sum(same) < 5
    words = {check.word_if_due(Of(1), step) for step in range(999)}  # type: ignore[arg-type]
    assert len(words) > 900 and all(word is not None and word < 1 << WORD_BITS for word in words)

"""Batches made ahead, streams with a state and uneven ends: killed ranks change no bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm.session.data
from ecrm.base.errors import UsageError
from ecrm.protection.erasure import ErasureProtection
from ecrm.run.started import Wanted
from ecrm.session.data import Indexed
from ecrm.session.session import Session
from ecrm.session.streams import Streams
from ecrm.testing.simulated_transport import PhaseFault, ProgramFailed
from support.sessions import Layout, Left, Train, run
from support.stub_workers import StubWorker

ROWS, STEPS = 40, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.layers(self.bags(ids).values()).squeeze(1)


def collate(samples: list[int]) -> dict[str, Any]:
    """Ids that the samples decide, and labels that are drawn."""
    ids = torch.tensor(samples) % ROWS
    kjt = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(samples), dtype=torch.int64))
    return {"ids": kjt, "label": torch.rand(len(samples)), "samples": samples}


class Counting:
    """A stream of batches of consecutive samples, with noise, and its place as state."""

    def __init__(self, slot: int, count: int | None) -> None:
        self.slot, self.count, self.at = slot, count, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        torch.rand(3)  # what is drawn as an iterator is made must not count
        return self._batches()

    def _batches(self) -> Iterator[dict[str, Any]]:
        while self.count is None or self.at < self.count:
            self.at += 1
            yield collate([1000 * self.slot + 7 * self.at + i for i in range(5)])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": torch.tensor([self.at, self.slot])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"].tolist() == [state["at"], self.slot]
        self.at = state["at"]


def script(
    data: Callable[[], Any],
    steps: int | None = STEPS,
    slots: int = 2,
    prepare: Callable[[Session], None] = lambda session: None,
    checks: int = 0,
) -> Train:
    def train(start: Callable[[Wanted], Any]) -> Session:
        torch.manual_seed(0)
        model = Model()
        apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
        session = Session(
            model,
            slots=slots,
            dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
            check_determinism=checks,
            start=start,
        )
        prepare(session)
        session.delivered = []
        session.on_commit(lambda step, logged: session.delivered.append((step, logged)))
        for batch in session.steps(data(), steps):
            F.mse_loss(session.model(batch["ids"]), batch["label"]).backward()
            session.log(first=batch["samples"][0], count=len(batch["samples"]))
        return session

    return train


def layout(slots: int = 2, interval: int = 1) -> Layout:
    return Layout(
        servers=3,
        trainers=2,
        spares=2,
        slots=slots,
        commit_interval=interval,
        protection=lambda servers: ErasureProtection(servers, 2, 1),
    )


KILLS = {
    "server": [PhaseFault(1, 4, "update")],
    "trainer": [PhaseFault(3, 3, "update")],
    "both": [PhaseFault(4, 2, "forward"), PhaseFault(0, 5, "dense")],
}
ENDS = {0: 3, 1: 8, 2: 5}
DATA: dict[str, tuple[Callable[[], Any], Callable[[], Any], int | None, int]] = {
    "indexed": (lambda: Indexed(range(61), 5, collate), lambda: indexed(None), STEPS, 2),
    "streams": (lambda: streams(0), lambda: streams(2), STEPS, 2),
    "streams that end": (lambda: ending(0), lambda: ending(2), 50, 3),
    "epochs": (lambda: Indexed(range(61), 5, collate, epochs=2), lambda: indexed(2), None, 3),
    "torchdata": (lambda: shuffled(0), lambda: shuffled(2), 50, 2),
}


def indexed(epochs: int | None) -> Indexed:
    return Indexed(range(61), 5, collate, epochs=epochs, workers=2)


def streams(workers: int) -> Streams:
    return Streams(lambda slot: Counting(slot, None), workers)


def ending(workers: int) -> Streams:
    return Streams(lambda slot: Counting(slot, ENDS[slot]), workers)


def shuffled(workers: int) -> Streams:
    """Two epochs of 18 and 10 samples in batches of 4, each in an order of its own."""

    def make(slot: int, epoch: int) -> StatefulDataLoader[int]:
        samples = range(1000 * slot, 1000 * slot + 18 - 8 * slot)
        return StatefulDataLoader(samples, 4, shuffle=True, collate_fn=collate)

    return Streams(make, workers, epochs=2)


@functools.cache
def calm(kind: str) -> Left:
    data, _, steps, slots = DATA[kind]
    return run(layout=layout(slots), train=script(data, steps, slots))


def logged(left: Left) -> dict[int, dict[int, tuple[int, int]]]:
    """{step from 0: {slot: (first sample, how many)}}"""
    return {
        finished - 1: {slot: (dict(said)["first"], dict(said)["count"]) for slot, said in slots}
        for finished, slots in left.logged
    }


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("kind", DATA)
def test_batches_of_every_kind_survive_kills_with_and_without_workers(
    kind, kill, interval, monkeypatch
):
    monkeypatch.setattr(ecrm.session.data, "Worker", StubWorker)
    here, in_workers, steps, slots = DATA[kind]
    data = in_workers if interval == 1 else here
    made = StubWorker.made
    left = run(KILLS[kill], layout(slots, interval), script(data, steps, slots))
    assert left.deaths == len(KILLS[kill]) and left.mismatches == 0
    assert (left.tables, left.dense) == (calm(kind).tables, calm(kind).dense)
    assert left.logged == calm(kind).logged[-len(left.logged) :] and len(left.logged) >= 3
    assert (StubWorker.made >= made + 16) == (interval == 1), "workers made the batches, or none"


def evaluating(workers: int) -> Train:
    """The script, and an evaluation after every 3 steps on batches that draw random numbers."""

    def prepare(session: Session) -> None:
        session.evaluated = {}

        @session.every(3)
        def evaluate() -> None:
            session.model.eval()
            for batch in session.eval_batches(Indexed(range(23), 4, collate, workers=workers)):
                session.gather(score=session.model(batch["ids"]), label=batch["label"])
            numbers = torch.stack([session.gathered["score"], session.gathered["label"]])
            session.evaluated[session.step] = tuple(numbers.flatten().tolist())

    return script(lambda: Indexed(range(61), 5, collate), prepare=prepare)


@pytest.mark.parametrize("rank", [0, 3])
def test_evaluations_with_workers_have_the_bits_of_those_without(rank, monkeypatch):
    monkeypatch.setattr(ecrm.session.data, "Worker", StubWorker)
    calm, made = run(layout=layout(), train=evaluating(0)), StubWorker.made
    left = run([PhaseFault(rank, 3, "evaluate")], layout(), evaluating(2))
    assert left.deaths == 1 and left.tables == calm.tables and left.dense == calm.dense
    assert left.evaluated == calm.evaluated
    assert [step for step, numbers in calm.evaluated] == [3, 6]
    assert all(len(numbers) == 2 * 23 for _, numbers in calm.evaluated)
    assert StubWorker.made >= made + 12, "workers made the 6 batches of each"


def test_a_stream_that_ends_leaves_its_slot_without_batches_and_the_last_one_ends_training():
    steps = logged(calm("streams that end"))
    assert len(steps) == max(ENDS.values())
    for step, slots in steps.items():
        assert slots.keys() == {slot for slot, count in ENDS.items() if step < count}
        assert all(first == 1000 * slot + 7 * (step + 1) for slot, (first, _) in slots.items())


def test_epochs_end_with_a_smaller_batch_and_slots_without_one():
    steps = logged(calm("epochs"))  # 122 samples in batches of 5 on 3 slots
    counts = [count for slots in steps.values() for _, (_, count) in sorted(slots.items())]
    assert counts == [5] * 24 + [2]
    assert len(steps) == 9 and list(steps[8]) == [0]


def test_epochs_of_a_stateful_loader_have_every_sample_once_and_end_unevenly():
    steps = logged(calm("torchdata"))
    counts = [[slots[slot][1] for slots in steps.values() if slot in slots] for slot in (0, 1)]
    assert counts == [[4, 4, 4, 4, 2] * 2, [4, 4, 2] * 2]
    orders = [[slots[0][0] for step, slots in steps.items() if step // 5 == e] for e in (0, 1)]
    assert orders[0] != orders[1], "each epoch has its own order"


class BeginsAnew(Counting):
    """A stream that begins anew where the state of its end is loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.at = 0 if self.at == self.count else self.at


@pytest.mark.parametrize("workers", [0, 2])
def test_slots_that_are_computed_twice_leave_streams_as_they_are(workers, monkeypatch):
    def in_epochs(workers: int) -> Streams:
        return Streams(lambda slot, epoch: BeginsAnew(slot, 3), workers, epochs=3)

    monkeypatch.setattr(ecrm.session.data, "Worker", StubWorker)
    calm = run(layout=layout(), train=script(lambda: in_epochs(0), 50))
    twice = replace(layout(), checks=True)
    checked = run(KILLS["trainer"], twice, script(lambda: in_epochs(workers), 50, checks=20))
    firsts = [slots[0][0] for slots in logged(calm).values()]
    assert firsts == [7, 14, 21] * 3
    assert checked.deaths == 1 and checked.mismatches == 0
    assert checked.logged == calm.logged[-len(checked.logged) :] and len(checked.logged) >= 3
    assert (checked.tables, checked.dense) == (calm.tables, calm.dense)


def test_a_gradient_is_a_mean_over_the_slots_that_have_a_batch():
    """Slot 1 alone for one step: as a session of that slot alone would train it."""

    class Late(Counting):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for batch in self._batches():
                batch["label"] = torch.linspace(0, 1, 5)
                yield batch

    # the same batch in both slots, then one of slot 1 alone; and all in a single slot
    def same(mine: int) -> Counting:
        return Late(0, 1 if mine == 0 else 2)

    two = run(layout=layout(2), train=script(lambda: Streams(same), 50, 2))
    one = run(
        layout=Layout(3, 1, 1, 1, 1, protection=layout().protection),
        train=script(lambda: Streams(lambda slot: Late(0, 2)), 50, 1),
    )
    assert two.tables == one.tables and two.dense == one.dense


MISTAKES = {
    "the stream of slot 1 has no batch": (lambda slot: Counting(slot, 3 * (1 - slot)), STEPS),
    "slot . is a list without state_dict": (lambda slot: [1, 2], STEPS),
    "does not say how many steps": (lambda slot: Counting(slot, 3), None),
    r"num_workers=2.* workers would be lost": (
        lambda slot: StatefulDataLoader(range(9), num_workers=2),
        STEPS,
    ),
}


@pytest.mark.parametrize("told", MISTAKES)
def test_streams_that_cannot_be_used_are_told(told):
    make, steps = MISTAKES[told]
    with pytest.raises(ProgramFailed) as failed:
        run(layout=layout(), train=script(lambda: Streams(make), steps))
    first = next(iter(failed.value.errors.values()))
    with pytest.raises(UsageError, match=told):
        raise first

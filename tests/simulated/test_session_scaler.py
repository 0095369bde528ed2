"""A session with torch's GradScaler: steps that it skips are skipped by rows, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ecrm.base.errors import NotFinite
from ecrm.checkpoint.folder import CheckpointFolder
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.engine.hooks import Hooks
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.replicate import ReplicateProtection
from ecrm.run import finite
from ecrm.run.finite import FiniteWatch
from ecrm.run.started import Wanted
from ecrm.session.session import Session
from ecrm.testing.simulate.workload import Workload
from ecrm.testing.simulated_transport import PhaseFault, SimulatedCluster
from ecrm.transport.base import Transport
from support.promises import CHECKPOINT_EVERY, GOES_ON, PROMISES, Promise
from support.sessions import Layout, Left, run, starter

STEPS, RATE = 9, 0.125
ROWS_ALONE, ALL = 2, 5
"""Steps in which gradients overflow: those of rows in slot 1, and all of them in slot 0."""


class Model(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="user", num_embeddings=30, embedding_dim=4, feature_names=["user"]
        )
        self.ebc = EmbeddingBagCollection(tables=[config], device=torch.device(device))
        self.top = nn.Linear(4, 1)

    def forward(self, kjt: KeyedJaggedTensor, overflows: bool) -> Tensor:
        pooled = self.ebc(kjt).values()
        if overflows:
            pooled.register_hook(lambda gradient: gradient * float("inf"))
        return self.top(pooled).squeeze(1)


def batch_of(step: int, slot: int) -> tuple[KeyedJaggedTensor, bool, float]:
    random = torch.Generator().manual_seed(100 * step + slot)
    ids = torch.randint(0, 30, (6,), generator=random)
    kjt = KeyedJaggedTensor(["user"], ids, lengths=torch.ones(6, dtype=torch.int64))
    return kjt, (step, slot) == (ROWS_ALONE, 1), 1e38 if (step, slot) == (ALL, 0) else 1.0


def loss_of(model: nn.Module, batch: tuple[KeyedJaggedTensor, bool, float]) -> Tensor:
    kjt, overflows, factor = batch
    return (model(kjt, overflows) - kjt.values() / 30).square().mean() * factor


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)


@functools.cache
def plain() -> tuple[dict[str, Tensor], list[float]]:
    """What torch comes to by itself, with one optimizer for everything: state and scales."""
    torch.manual_seed(0)
    model, scales = Model("cpu"), scaler()
    before = model.state_dict()
    before["ebc.embedding_bags.user.weight"].copy_(rows())
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=RATE), []
    for step in range(STEPS):
        seen.append(scales.get_scale())
        optimizer.zero_grad()
        for slot in range(2):
            scales.scale(loss_of(model, batch_of(step, slot)) / 2).backward()
        scales.step(optimizer)
        scales.update()
    return model.state_dict(), seen


def rows() -> Tensor:
    return torch.randn(30, 4, generator=torch.Generator().manual_seed(1))


def train(
    start: Callable[[Wanted], Any],
    found: list[Any],
    changed: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Session:
    torch.manual_seed(0)
    first = {**Model("cpu").state_dict(), "ebc.embedding_bags.user.weight": rows()}
    model, grad_scaler = Model("meta"), scaler()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": RATE})
    session = Session(
        model,
        slots=2,
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        grad_scaler=grad_scaler,
        start=start,
    )
    session.load_state_dict(first)
    session.delivered = []  # type: ignore[attr-defined]
    session.on_commit(lambda step, logged: session.delivered.append((step, logged)))  # type: ignore[attr-defined]
    for batch in session.steps(batch_of, STEPS):
        grad_scaler.scale(changed(loss_of(session.model, batch))).backward()
        session.log(scale=grad_scaler.get_scale())
    found.append(session.state_dict())
    return session


def trained(faults: list[PhaseFault], layout: Layout) -> tuple[Left, dict[str, Tensor]]:
    found: list[Any] = []
    left = run(faults, layout, lambda start: train(start, found))
    return left, found[0]


@functools.cache
def calm() -> tuple[Left, dict[str, Tensor]]:
    return trained([], Layout())


def test_numbers_and_scales_are_those_of_torch_alone():
    left, state = calm()
    expected, scales = plain()
    assert len(set(scales)) > 1 and scales[ROWS_ALONE + 1] < scales[ROWS_ALONE]
    assert scales[ALL + 1] < scales[ALL]
    logged = [dict(values)["scale"] for _, slots in left.logged for _, values in slots]
    assert logged == [scale for scale in scales for _ in range(2)]
    assert state.keys() == expected.keys() and all(t.isfinite().all() for t in state.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize(
    "faults",
    [
        [PhaseFault(4, ROWS_ALONE, "update"), PhaseFault(1, ALL, "dense")],
        [PhaseFault(0, ROWS_ALONE, "dense"), PhaseFault(5, ALL, "forward")],
        [PhaseFault(2, ROWS_ALONE, "parity"), PhaseFault(4, ALL + 1, "update")],
    ],
    ids=["trainer, server", "server, trainer", "in parity"],
)
def test_kills_around_skipped_steps_change_no_bit(faults, interval):
    if interval == 4 and faults[0].phase == "parity":
        faults = faults[1:]  # nothing is committed in that step
    protection = {1: lambda n: ReplicateProtection(n, 2), 4: lambda n: ErasureProtection(n, 3, 1)}
    layout = Layout(spares=2, commit_interval=interval, protection=protection[interval])
    left, state = trained(faults, layout)
    assert left.deaths == len(faults) and left.mismatches == 0
    assert (left.tables, left.dense) == (calm()[0].tables, calm()[0].dense)
    assert all(torch.equal(state[name], calm()[1][name]) for name in state)


SEVEN = {promise.workload["protection"]: promise for promise in reversed(PROMISES.values())}
"""A promise of each protection."""
LONG = {"chain", "replicate", "erasure"}
"""What other tests here, or the schedules of sessions, have in `make test` already."""
KINDS = [pytest.param(kind, marks=pytest.mark.drill) if kind in LONG else kind for kind in SEVEN]


def laid_out(promise: Promise, folder: Path) -> Layout:
    """Ranks for that promise, with what it writes in a folder."""
    workload = replace(Workload(folder=str(folder)), **promise.workload)
    policy = CheckpointPolicy(STEPS, every_steps=CHECKPOINT_EVERY)
    return Layout(
        servers=workload.servers,
        spares=2,
        protection=lambda servers: workload.make_protection(),
        durable=lambda: promise.durable(folder) if promise.durable else None,
        checkpoints=lambda engine: (
            Checkpoints(engine, CheckpointFolder(folder), {}, policy)
            if promise.checkpoints
            else None
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_with_each_protection_kills_in_skipped_steps_change_no_bit(kind, tmp_path):
    promise = SEVEN[kind]
    layout = laid_out(promise, tmp_path)
    faults = [PhaseFault(1, ROWS_ALONE, "update"), PhaseFault(layout.servers, ALL, "dense")]
    if not promise.survives and not promise.durable:
        faults = []  # its bits are promised while nothing fails
    elif not promise.exact:
        faults = faults[1:]  # while no server dies
    left, state = trained(faults, layout)
    assert left.deaths == len(faults) and left.mismatches == 0
    assert (left.tables, left.dense) == (calm()[0].tables, calm()[0].dense)
    assert left.logged == calm()[0].logged
    assert all(torch.equal(state[name], calm()[1][name]) for name in state)


def test_a_protection_that_is_not_exact_skips_the_same_steps(tmp_path):
    layout = laid_out(SEVEN["stateless"], tmp_path)
    assert SEVEN["stateless"].beyond == GOES_ON
    left, state = trained([PhaseFault(1, ROWS_ALONE, "update")], layout)
    assert left.deaths == 1 and left.logged == calm()[0].logged
    assert left.tables != calm()[0].tables and all(t.isfinite().all() for t in state.values())


@pytest.mark.parametrize("faults", [[], [PhaseFault(0, 2, "dense")]], ids=["calm", "killed"])
def test_gradients_that_are_never_finite_end_the_run_on_all_ranks(monkeypatch, faults):
    monkeypatch.setattr(finite, "MOST_SKIPPED", 4)
    layout = Layout(spares=2)
    cluster = SimulatedCluster(layout.world, 5, faults, most_calls=300_000)

    def program(transport: Transport) -> tuple[str, int]:
        watch = FiniteWatch(True, 10, lambda fields: None)
        hooks = Hooks(
            phase=lambda step, name: cluster.enter_phase(transport.rank, step, name),
            skipped=watch.skipped,
        )
        try:
            train(starter(transport, hooks, layout), [], lambda loss: loss * float("nan"))
        except NotFinite as error:
            return str(error), watch.skipped_before(STEPS)
        return "", 0

    outcome = cluster.run(program)
    assert len(outcome.killed) == len(faults)
    assert len(outcome.results) == layout.world - len(faults)
    ((told, skipped),) = set(outcome.results.values())
    assert told.startswith("4 steps in a row were skipped, up to step 3, since gradients are not")
    assert skipped == 4

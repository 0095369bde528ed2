"""Every scheduler and optimizer that torch has: a kill changes no bit, or a refusal names it."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ecrm.errors import UsageError
from ecrm.model.nested_state import placed, read, written
from ecrm.protection.erasure import ErasureProtection
from ecrm.session.run import Wanted
from ecrm.session.session import Session
from ecrm.transport.simulated import PhaseFault, ProgramFailed
from support.sessions import Layout, Left, run

SMALL = Layout(2, 2, 1, protection=lambda servers: ErasureProtection(servers, 1, 1))
"""Ranks 0 and 1 are servers, 2 and 3 trainers, 4 is a spare."""
STEPS = 7
KILLS = [PhaseFault(2, 4, "update")]
"""The main trainer dies; the spare takes its slot over, and the dense part with it."""

Made = Callable[..., Any]


class Half:
    """A function of the epoch, as an object."""

    def __call__(self, epoch: int) -> float:
        return 0.5**epoch


SCHEDULERS: dict[str, Made] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2)]
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Half()),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 5], 0.5),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.MultiStepLR(o, [1, 2], 0.5)], [3]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
}
NO_SCHEDULERS = {"LRScheduler", "ReduceLROnPlateau"}
"""The base class, and the one that steps by a metric, which is refused."""

OPTIMIZERS: dict[str, Made] = {
    "ASGD": lambda ps: optim.ASGD(ps, 0.05, t0=2),
    "Adadelta": lambda ps: optim.Adadelta(ps, 0.5),
    "Adafactor": lambda ps: optim.Adafactor(ps, 0.05),
    "Adagrad": lambda ps: optim.Adagrad(ps, 0.05, lr_decay=0.1),
    "Adam": lambda ps: optim.Adam(ps, 0.05, amsgrad=True),
    "AdamW": lambda ps: optim.AdamW(ps, 0.05, fused=True),
    "Adamax": lambda ps: optim.Adamax(ps, 0.05),
    "NAdam": lambda ps: optim.NAdam(ps, 0.05),
    "RAdam": lambda ps: optim.RAdam(ps, 0.05, foreach=True),
    "RMSprop": lambda ps: optim.RMSprop(ps, 0.05, momentum=0.5, centered=True),
    "Rprop": lambda ps: optim.Rprop(ps, 0.05),
    "SGD": lambda ps: optim.SGD(
        [{"params": [p]} for p in ps], 0.05, momentum=0.9, nesterov=True, maximize=False
    ),
}
NO_OPTIMIZERS = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}
"""The base class, one that needs a closure, one of sparse gradients, one of matrices alone."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        self.linear = nn.Linear(4, 1)


def ids(step: int, slot: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor([step % 9, slot]), lengths=torch.tensor([1, 1]))


def trained(optimizer: Made | None = None, scheduler: Made | None = None, faults: Any = ()) -> Left:
    def train(start: Callable[[Wanted], Any]) -> Session:
        torch.manual_seed(0)
        model = Model()
        apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
        session = Session(
            model,
            slots=2,
            dense_optimizer=optimizer or functools.partial(optim.SGD, lr=0.1, momentum=0.9),
            scheduler=scheduler,
            start=start,
        )
        session.delivered = []
        session.on_commit(lambda step, logged: session.delivered.append((step, logged)))
        for batch in session.steps(ids, STEPS):
            loss = session.model.linear(session.model.bags(batch).values()).tanh().mean()
            loss.backward()
            session.log(loss=loss)
        return session

    return run(list(faults), SMALL, train)


def classes(module: Any, base: type) -> set[str]:
    found = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {n for n, kind in found.items() if isinstance(kind, type) and issubclass(kind, base)}


def test_every_scheduler_and_optimizer_of_torch_has_an_entry():
    assert classes(lr_scheduler, lr_scheduler.LRScheduler) == {*SCHEDULERS, *NO_SCHEDULERS}
    assert classes(optim, optim.Optimizer) == {*OPTIMIZERS, *NO_OPTIMIZERS}


@pytest.mark.parametrize("name", [*SCHEDULERS, *OPTIMIZERS])
def test_a_kill_changes_no_bit(name):
    made = {"scheduler" if name in SCHEDULERS else "optimizer": {**SCHEDULERS, **OPTIMIZERS}[name]}
    calm, killed = trained(**made), trained(**made, faults=KILLS)
    assert killed.deaths == 1 and killed.dense == calm.dense and len(calm.dense) == 1
    assert killed.tables == calm.tables


def test_a_scheduler_of_a_metric_and_an_optimizer_of_a_closure_are_refused():
    with pytest.raises(ProgramFailed, match="ReduceLROnPlateau steps by a metric"):
        trained(scheduler=lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(ProgramFailed, match=r"LBFGS\.step needs a closure"):
        trained(optimizer=optim.LBFGS)


class Noted(dict):  # type: ignore[type-arg]
    """A kind of dict whose `update` does something else, as a Counter's does."""

    def update(self, *_: Any) -> None:
        raise AssertionError("entries are put one by one")


@pytest.mark.parametrize(
    "state",
    [
        Counter({2: 1, 5: 3}),
        OrderedDict(b=torch.ones(2), a=1),
        {"nested": [Counter("ab"), (Counter("c"), 1.5)]},
    ],
    ids=["Counter", "OrderedDict", "nested"],
)
def test_kinds_of_dicts_are_copied_and_read_back_as_they_are(state):
    for again in (placed(state), placed(state, placed(state)), read(written(state))):
        assert type(again) is type(state) and list(again) == list(state)
        assert str(again) == str(state)
    ways = defaultdict(dict, {"a": {"b": Counter("xxy")}})
    assert type(placed(ways)) is defaultdict and placed(ways) == ways
    kept = Noted(a=torch.ones(2))
    assert torch.equal(placed(kept)["a"], kept["a"])


def test_what_cannot_be_read_back_is_refused_by_name():
    with pytest.raises(UsageError, match="cannot be read back, since it has .*Half"):
        read(written({"object": Half()}))

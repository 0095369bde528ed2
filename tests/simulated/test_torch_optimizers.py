"""Every optimizer and scheduler of torch: kills and a resume change no bit, or a refusal says so.

A new one in a later torch has no entry here, and fails the first test.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler, swa_utils
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from ecrm.base.errors import Unrecoverable, UsageError
from ecrm.checkpoint.folder import CheckpointFolder, find
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.checkpoint.restore import Restorer
from ecrm.model.module_replica import ModuleReplica
from ecrm.model.nested_state import bytes_of
from ecrm.protection.erasure import ErasureProtection
from ecrm.run.started import Wanted
from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault, ProgramFailed
from support.sessions import Layout, Left, Train, run

STEPS, STOP, SPARE = 7, 4, 5
SMALL = Layout(
    servers=3, trainers=2, spares=2, protection=lambda servers: ErasureProtection(servers, 2, 1)
)
KILLS = [PhaseFault(3, 2, "update"), PhaseFault(0, 3, "parity")]
"""A trainer, whose dense part a spare takes over; then a server."""
LATER_KILLS = [PhaseFault(4, 5, "dense")]

Parameters = list[nn.Parameter]
MakeOptimizer = Callable[[Parameters], Any]
MakeScheduler = Callable[[Any], Any]


class Model(nn.Module):
    """One table under a small network; without vectors where an optimizer takes matrices alone."""

    def __init__(self, vectors: bool = True) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        self.over = nn.Sequential(
            nn.Linear(4, 3, bias=vectors), nn.GELU(), nn.Linear(3, 2, bias=vectors)
        )

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.over(self.bags(ids).values())


def ids(step: int, slot: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["f"],
        torch.tensor([step % 9, slot, 5, (3 * step + slot) % 9]),
        lengths=torch.tensor([1, 2, 1]),
    )


Ends = dict[int, dict[str, str]]
"""By rank, all that its replica holds at the end, in words, by name."""


def script(case: Case, ends: Ends, steps: int) -> Train:
    def train(start: Callable[[Wanted], Any]) -> Session:
        torch.manual_seed(7)
        model = Model(case.vectors)
        apply_optimizer_in_backward(torch.optim.Adagrad, model.bags.parameters(), {"lr": 0.1})
        session = Session(
            model,
            slots=2,
            seed=3,
            dense_optimizer=case.make,
            scheduler=case.schedule,
            start=start,
        )
        session.delivered = []  # type: ignore[attr-defined]
        for batch in session.steps(ids, steps):
            F.softplus(session.model(batch)).mean().backward()
        if isinstance(session._engine.state.dense, ModuleReplica):
            ends[session.rank] = {
                name: bytes_of(value).numpy().tobytes().hex()
                if isinstance(value, Tensor)
                else repr(value)
                for name, value in session._engine.state.dense.whole_state
            }
        return session

    return train


@dataclass(frozen=True)
class Case:
    """An optimizer, a scheduler if any, and whether the model has vectors."""

    make: MakeOptimizer
    schedule: MakeScheduler | None = None
    vectors: bool = True


def trained(
    case: Case, faults: Sequence[PhaseFault] = (), layout: Layout = SMALL, steps: int = STEPS
) -> tuple[Mapping[str, str], dict[str, str], set[int]]:
    """The tables at the end, what holders of the dense part hold, which is one, and their ranks."""
    ends: Ends = {}
    left: Left = run(faults, layout, script(case, ends, steps))
    assert left.deaths == len(faults) and left.mismatches == 0
    held = list(ends.values())
    assert len(held) > 1 and all(each == held[0] for each in held)
    return left.tables, held[0], set(ends)


def check_bits(case: Case, folder: Path) -> None:
    """Kills change no bit; nor does a stop after kills, and a resume in which others come."""
    expected = trained(case)[:2]

    def layout(resumes: bool) -> Layout:
        kept = CheckpointFolder(folder)
        return replace(
            SMALL,
            resumes=resumes,
            durable=lambda: Restorer(kept, find(folder)[0] if resumes else ()),
            checkpoints=lambda engine: Checkpoints(
                engine, kept, {}, CheckpointPolicy(STEPS, every_steps=STOP)
            ),
        )

    *_, holders = trained(case, KILLS, layout(resumes=False), STOP)
    assert holders == {SPARE, 4}
    assert find(folder)[0]
    *ended, holders = trained(case, LATER_KILLS, layout(resumes=True))
    assert (*ended,) == expected and holders == {3, SPARE}


def sgd(parameters: Parameters) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def with_two_groups(parameters: Parameters) -> optim.Optimizer:
    few, many = parameters[:1], parameters[1:]
    return optim.AdamW([{"params": few, "lr": 0.1}, {"params": many, "betas": (0.5, 0.9)}], lr=0.01)


def with_a_tensor(parameters: Parameters) -> optim.Optimizer:
    return optim.Adam(parameters, lr=torch.tensor(0.1), foreach=False)


def of(kind: Any, **given: Any) -> MakeOptimizer:
    return lambda parameters: kind(parameters, **given)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adafactor": of(optim.Adafactor, lr=0.1),
    "Adafactor, maximize": of(optim.Adafactor, lr=0.1, maximize=True, foreach=False),
    "Adadelta": of(optim.Adadelta, lr=0.5, weight_decay=0.1),
    "Adadelta, foreach": of(optim.Adadelta, lr=0.5, foreach=True),
    "Adagrad": of(optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adagrad, fused": of(optim.Adagrad, lr=0.1, fused=True),
    "Adam": of(optim.Adam, lr=0.1),
    "Adam, amsgrad": of(optim.Adam, lr=0.1, amsgrad=True, maximize=True, weight_decay=0.1),
    "Adam, foreach": of(optim.Adam, lr=0.1, foreach=True, decoupled_weight_decay=True),
    "Adam, fused": of(optim.Adam, lr=0.1, fused=True, amsgrad=True),
    "Adam, rate a tensor": with_a_tensor,
    "Adamax": of(optim.Adamax, lr=0.1),
    "AdamW": of(optim.AdamW, lr=0.1, amsgrad=True),
    "AdamW, fused": of(optim.AdamW, lr=0.1, fused=True),
    "AdamW, two groups": with_two_groups,
    "ASGD": of(optim.ASGD, lr=0.1, t0=2, weight_decay=0.1),
    "ASGD, foreach": of(optim.ASGD, lr=0.1, t0=2, foreach=True),
    "Muon": of(optim.Muon, lr=0.1),
    "NAdam": of(optim.NAdam, lr=0.1, decoupled_weight_decay=True),
    "RAdam": of(optim.RAdam, lr=0.1, betas=(0.5, 0.6)),
    "RMSprop": of(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Rprop": of(optim.Rprop, lr=0.01),
    "SGD": of(optim.SGD, lr=np.float32(0.1)),
    "SGD, fused": of(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "SGD, nesterov": of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
}
NEEDS_MATRICES = {"Muon"}
REFUSED = {
    "LBFGS": (of(optim.LBFGS), r"LBFGS\.step needs a closure, .* such as torch\.optim\.AdamW"),
    "SparseAdam": (
        of(optim.SparseAdam),
        r"SparseAdam takes sparse gradients .* give torch\.optim\.Adam",
    ),
}


class Falling:
    """A factor with a state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: float) -> float:
        self.calls += 1
        return 2 / (1 + self.calls)


def sequential(optimizer: Any) -> lr_scheduler.LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        lr_scheduler.MultiStepLR(optimizer, [1, 1, 2], 0.5),
        lr_scheduler.CosineAnnealingLR(optimizer, 4),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [2, 5])


def chained(optimizer: Any) -> lr_scheduler.ChainedScheduler:
    parts = [
        lr_scheduler.MultiStepLR(optimizer, [2, 2], 0.5),
        lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    ]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def by(kind: Any, *given: Any, **named: Any) -> MakeScheduler:
    return lambda optimizer: kind(optimizer, *given, **named)


SCHEDULERS: dict[str, MakeScheduler] = {
    "LambdaLR": by(lr_scheduler.LambdaLR, lambda epoch: np.float32(1) / np.float32(1 + epoch)),
    "LambdaLR, an object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Falling()),
    "MultiplicativeLR": by(lr_scheduler.MultiplicativeLR, lambda epoch: 0.9),
    "MultiplicativeLR, an object": lambda optimizer: lr_scheduler.MultiplicativeLR(
        optimizer, Falling()
    ),
    "StepLR": by(lr_scheduler.StepLR, 2, 0.5),
    "MultiStepLR": by(lr_scheduler.MultiStepLR, [1, 3, 3, 5], 0.5),
    "ConstantLR": by(lr_scheduler.ConstantLR, 0.5, 4),
    "LinearLR": by(lr_scheduler.LinearLR, 0.1, total_iters=4),
    "ExponentialLR": by(lr_scheduler.ExponentialLR, 0.8),
    "SequentialLR": sequential,
    "PolynomialLR": by(lr_scheduler.PolynomialLR, 5, 2.0),
    "CosineAnnealingLR": by(lr_scheduler.CosineAnnealingLR, 3),
    "ChainedScheduler": chained,
    "CyclicLR": by(lr_scheduler.CyclicLR, 0.01, 0.2, 2, mode="exp_range", gamma=0.9),
    "CyclicLR, a function": by(
        lr_scheduler.CyclicLR, 0.01, 0.2, 2, scale_fn=lambda cycle: 0.9**cycle
    ),
    "CyclicLR, an object": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.2, 2, scale_fn=Falling()
    ),
    "CosineAnnealingWarmRestarts": by(lr_scheduler.CosineAnnealingWarmRestarts, 2, 2),
    "OneCycleLR": by(lr_scheduler.OneCycleLR, 0.3, total_steps=STEPS + 1, three_phase=True),
    "SWALR": by(swa_utils.SWALR, 0.01, 4, "linear"),
    "SWALR, cos": by(swa_utils.SWALR, 0.01, 4, "cos"),
}
STEPS_BY_REPORTS = {"ReduceLROnPlateau"}  # tests/simulated/test_session_stop.py


def classes(module: Any, base: type) -> set[str]:
    """The public classes of a module below `base`, by name."""
    found = inspect.getmembers(module, inspect.isclass)
    return {
        name
        for name, kind in found
        if issubclass(kind, base) and kind is not base and name[0] != "_"
    }


def test_every_optimizer_and_scheduler_of_this_torch_is_here():
    assert {name.partition(",")[0] for name in [*OPTIMIZERS, *REFUSED]} == classes(
        optim, optim.Optimizer
    )
    schedulers = classes(lr_scheduler, lr_scheduler.LRScheduler)
    schedulers |= classes(swa_utils, lr_scheduler.LRScheduler)
    assert {name.partition(",")[0] for name in [*SCHEDULERS, *STEPS_BY_REPORTS]} == schedulers


def variants_as_drills(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.drill] * ("," in name)) for name in names]


@pytest.mark.parametrize("name", variants_as_drills(OPTIMIZERS))
def test_kills_and_a_resume_change_no_bit_of_what_an_optimizer_trains(name, tmp_path):
    check_bits(Case(OPTIMIZERS[name], vectors=name not in NEEDS_MATRICES), tmp_path)


def keyed(parameters: Parameters, make: MakeOptimizer) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper({str(n): p for n, p in enumerate(parameters)}, make)


def warmed_up(parameters: Parameters) -> optim.Optimizer:
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1)]
    return WarmupOptimizer(keyed(parameters, of(optim.Adam, lr=0.01)), stages, lr=0.01)


def clipped(parameters: Parameters) -> optim.Optimizer:
    inner = keyed(parameters, of(optim.SGD, lr=0.1, momentum=0.9))
    return GradientClippingOptimizer(inner, GradientClipping.NORM, max_gradient=0.01)


def combined(parameters: Parameters) -> optim.Optimizer:
    few, many = parameters[:1], parameters[1:]
    return CombinedOptimizer([("a", keyed(few, of(optim.Adam, lr=0.01))), ("b", warmed_up(many))])


@pytest.mark.parametrize("make", [warmed_up, clipped, combined])
def test_kills_and_a_resume_change_no_bit_of_what_torchrecs_optimizers_train(make, tmp_path):
    check_bits(Case(make), tmp_path)


@pytest.mark.parametrize("name", variants_as_drills(SCHEDULERS))
def test_kills_and_a_resume_change_no_bit_of_what_a_schedule_leads(name, tmp_path):
    check_bits(Case(sgd, SCHEDULERS[name]), tmp_path)


@pytest.mark.drill
@pytest.mark.parametrize("make", [with_two_groups, with_a_tensor])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedule_with_several_groups_and_with_rates_in_a_tensor(name, make, tmp_path):
    check_bits(Case(make, SCHEDULERS[name]), tmp_path)


def refusal(case: Case) -> str:
    """The one UsageError with which the run ends; ranks that others have left say so."""
    with pytest.raises(ProgramFailed) as failed:
        trained(case)
    errors = list(failed.value.errors.values())
    assert len(errors) == SMALL.world
    assert {type(error) for error in errors} <= {UsageError, Unrecoverable}
    (said,) = {str(error) for error in errors if isinstance(error, UsageError)}
    return said


def test_a_schedule_that_a_new_holder_does_not_get_is_noticed(monkeypatch, tmp_path):
    """The canary of the tests above."""
    monkeypatch.setattr(lr_scheduler.StepLR, "load_state_dict", lambda self, state: None)
    with pytest.raises(ProgramFailed, match="the dense part of rank"):
        check_bits(Case(sgd, SCHEDULERS["StepLR"]), tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_do_not_step_by_dense_gradients_are_refused_by_name(name):
    make, said = REFUSED[name]
    assert re.search(said, refusal(Case(make)))


def test_a_schedule_that_steps_by_a_value_needs_somebody_who_reports_one():
    assert (
        "the scheduler steps by a value, and nothing reports any: call session.report"
        in refusal(Case(sgd, lr_scheduler.ReduceLROnPlateau))
    )


class Level(enum.Enum):
    LOW = 1


KEPT_IN_GROUPS: dict[str, tuple[object, str]] = {
    "an enum": (Level.LOW, r"add_safe_globals\(\[Level\]\)"),
    "a deque": (deque([1]), "in dicts, lists and tuples$"),
    "a function": (len, "in dicts, lists and tuples$"),
}


@pytest.mark.parametrize("late", [False, True], ids=["at once", "by a schedule"])
@pytest.mark.parametrize("name", KEPT_IN_GROUPS)
def test_what_no_other_rank_can_read_in_a_group_is_refused_by_name(name, late):
    value, advice = KEPT_IN_GROUPS[name]

    def make(parameters: Parameters) -> optim.Optimizer:
        return optim.SGD([{"params": parameters, "mark": None if late else value}], lr=0.1)

    class Marking(lr_scheduler.StepLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            if self.last_epoch == 3:
                self.optimizer.param_groups[0]["mark"] = value

    said = refusal(Case(make, (lambda optimizer: Marking(optimizer, 2)) if late else None))
    assert re.search(rf"optimizer group 0\.mark cannot be read back .*{advice}", said), said

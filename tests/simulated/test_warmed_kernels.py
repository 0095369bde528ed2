"""Kernels that are compiled before a run on a GPU are those that it launches, and no others."""

import re
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ecrm.engine.computed import Computed
from ecrm.engine.hooks import Hooks, StepAborted
from ecrm.kernels import dispatch
from ecrm.kernels.warm_up import warm_up
from ecrm.ops import _Interact, no_memory
from ecrm.placement.initial_values import Uniform
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table, row_spaces
from ecrm.run.warm_up import shapes_of
from ecrm.tables.pooling import _summed
from ecrm.testing.imitated_gpu import imitated_gpu
from ecrm.testing.simulate.workload import Workload, make_engine, train_step
from ecrm.testing.simulated_transport import PhaseFault, SimulatedCluster

pytest.importorskip("triton")

from support.launches import launches

DIM, FEATURES = 8, 2
ERASURE = Workload(
    tables=(
        Table("a", 9, DIM, SparseOptimizer("rowwise_adagrad", 0.1), Uniform(0.1, 0.2)),
        Table("b", 9, DIM, SparseOptimizer("adam", 0.1, weight_decay=0.1)),
    ),
    slots=1,
    trainers=1,
    servers=4,
    k=2,
    m=2,
    steps=3,
    ids_per_slot=2,
    commit_interval=2,
    rebuild_rows_per_step=1000,
    rows_on="imitated",
)
COPIES = replace(ERASURE, protection="replicate", servers=2, m=1, spares=0, commit_interval=1)
NONE = replace(ERASURE, protection="none", servers=1, spares=0, steps=1)


def run(workload: Workload, *faults: PhaseFault) -> int:
    """Ranks on simulated GPUs until all is trained and rebuilt; returns how many died."""
    cluster = SimulatedCluster(workload.world_size, 0, list(faults))

    def program(transport):
        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name))
        with imitated_gpu():
            engine = make_engine(workload, transport, hooks, lambda: 0.0)
            computed = Computed()
            while engine.step < workload.steps:
                with suppress(StepAborted):
                    train_step(workload, engine, computed)
            engine.rebuild_all()

    return len(cluster.run(program).killed)


class Context(SimpleNamespace):
    """What autograd gives a function. Autograd itself calls them outside of the imitation."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


def both_ways(function: type[torch.autograd.Function], *given: object) -> None:
    context = Context()
    out = function.forward(context, *given)
    function.backward(context, torch.ones_like(out))


def train_and_pool() -> None:
    """A session: the interaction of rows, and pooled rows."""
    with imitated_gpu() as device:
        rows, places = (torch.ones(2, DIM, device=device), torch.zeros(4).long().to(device))
        both_ways(_Interact, rows, rows, places, no_memory)
        values = torch.ones(4, DIM, device=device)
        _summed(rows, [(places, values, None), (places, values, places)], no_memory)


@pytest.fixture(scope="module")
def launched() -> set[str]:
    """Of servers, trainers and holders of redundancy, with commits, recoveries and rebuilds."""
    dispatch.use_on_gpu("auto")
    with launches() as seen:
        assert run(ERASURE, PhaseFault(1, 2, "dense")) == 1
        assert run(COPIES) == run(NONE) == 0
        train_and_pool()
    return seen


@pytest.fixture(scope="module")
def warmed() -> set[str]:
    with launches(done=False) as seen:
        for shapes in shapes_of(row_spaces(ERASURE.tables), "sgd", FEATURES):
            warm_up(shapes, "cpu", "triton")
    return seen


def test_what_a_run_launches_is_compiled_before_it(launched, warmed):
    assert len(launched) > 25
    assert sorted(launched - warmed) == []


def test_nothing_else_is_compiled(launched, warmed):
    assert sorted(warmed - launched) == []


def test_a_run_moves_16_bytes_at_a_time(launched):
    """Four floats or words, of every record and of every row."""
    sizes = {of for launch in launched for of in re.findall(r"VECTOR=(\d+)", launch)}
    assert sizes == {"4"}

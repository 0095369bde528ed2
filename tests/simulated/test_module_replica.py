"""A module with buffers, dropout, AdamW and a schedule ends the same, whoever dies (simulated)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ecrm.engine.engine import Engine
from ecrm.engine.hooks import EnginePolicy, Hooks, StepAborted
from ecrm.engine.step_input import StepInput
from ecrm.engine.table_digest import table_digests
from ecrm.model.module_replica import ModuleReplica
from ecrm.placement.assignment import initial_view
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table
from ecrm.protection.erasure import ErasureProtection
from ecrm.testing.simulated_transport import PhaseFault, SimulatedCluster

TABLES = (Table("user", 50, 8), Table("item", 90, 8))
SLOTS, STEPS, BATCH = 2, 9, 16
TRAINERS = (4, 5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.mlp = nn.Sequential(nn.Linear(16, 9), nn.GELU(), nn.Dropout(0.2), nn.Linear(9, 1))
        self.seldom = nn.Parameter(torch.ones(()))

    def forward(self, rows, step):
        out = self.mlp(self.norm(rows)).squeeze(1)
        return out * self.seldom if step % 3 == 2 else out


def make_replica():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = Net()
    return ModuleReplica(
        module,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.03),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5),
    )


def slot_step(replica, values, places, step, slot):
    """(row gradients, contribution, state) of a slot."""
    replica.begin_slot(slot)
    torch.manual_seed(1000 * step + slot)
    leaf = values.requires_grad_()
    labels = (torch.rand(BATCH) < 0.5).float()
    loss = binary_cross_entropy_with_logits(
        replica.module(leaf[places].view(BATCH, 16), step), labels
    )
    loss.backward()
    return [leaf.grad / SLOTS], replica.contribution(SLOTS), replica.slot_state(slot == 0)


def train(transport, hooks, interval, without_undo):
    protection = ErasureProtection(4, 3, 1)
    replica = make_replica()
    if without_undo:
        replica.undo = lambda: None
    engine = Engine(
        transport,
        TABLES,
        initial_view("dedicated", protection.shape, len(TRAINERS), 2, SLOTS, 2),
        protection,
        SparseOptimizer("rowwise_adagrad", 0.05),
        replica.reset,
        seed=3,
        policy=EnginePolicy(commit_interval=interval, dense_replicas=2),
        hooks=hooks,
        clock=lambda: 0.0,
    )
    while True:
        try:
            while engine.step < STEPS:
                step, rows, places = engine.step, {}, {}
                for slot in engine.slots:
                    ids = torch.randint(
                        0,
                        140,
                        (2 * BATCH,),
                        generator=torch.Generator().manual_seed(99 * step + slot),
                    )
                    unique, places[slot] = ids.unique(return_inverse=True)
                    rows[slot] = [unique]
                values = engine.lookup(rows, apply_follows=True)
                done = {
                    slot: slot_step(engine.state.dense, values[slot][0], places[slot], step, slot)
                    for slot in reversed(engine.slots)
                }
                engine.apply(
                    StepInput(
                        {slot: gradients for slot, (gradients, _, _) in done.items()},
                        {slot: contribution for slot, (_, contribution, _) in done.items()},
                        slot_state={
                            slot: state for slot, (_, _, state) in done.items() if state is not None
                        },
                        commit=step + 1 == STEPS,
                    )
                )
            engine.rebuild_all()
            assert engine.verify_parity().mismatches == 0
            with engine.recovery.recovering():
                tables = table_digests(engine, engine.view.reporter)
                transport.agree(True)
            break
        except StepAborted:
            continue
    held = engine.state.dense
    assert held is None or held is replica
    return tables, None if held is None else {
        name: tensor.clone() for name, tensor in held.named_state.items()
    }


def run(faults, interval=1, without_undo=False):
    """(tables, state of each holder, ranks that died)."""
    cluster = SimulatedCluster(8, 5, faults)

    def program(transport):
        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name))
        return train(transport, hooks, interval, without_undo)

    outcome = cluster.run(program)
    tables = [tables for tables, _ in outcome.results.values() if tables]
    states = [state for _, state in outcome.results.values() if state]
    assert len(tables) == 1 and len(states) == 2
    return tables[0], states, sorted(kill.rank for kill in outcome.killed)


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def calm():
    tables, (one, other), killed = run([])
    assert not killed and not differing(one, other)
    assert int(one["norm.num_batches_tracked"]) == STEPS
    assert float(one["optimizer.seldom.step"]) == STEPS // 3
    return tables, one


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(
    "deaths",
    [
        [(1, 4, "update")],
        [(2, 5, "parity")],
        [(4, 4, "lookup")],
        [(4, 4, "update")],
        [(5, 5, "dense")],
        [(5, 2, "commit")],
        [(1, 4, "update"), (4, 4, "update")],
        [(4, 1, "dense"), (5, 7, "dense")],
        [(4, 2, "parity"), (3, 5, "lookup"), (5, 7, "update")],
    ],
)
def test_the_state_is_that_of_the_calm_run(calm, deaths, interval):
    tables, states, killed = run([PhaseFault(*death) for death in deaths], interval)
    assert killed == sorted(rank for rank, _, _ in deaths)
    assert tables == calm[0]
    assert [differing(state, calm[1]) for state in states] == [[], []]


def test_a_replica_that_does_not_undo_ends_with_another_state(calm):
    _, states, killed = run([PhaseFault(1, 4, "update")], 3, without_undo=True)
    assert killed == [1]
    assert all("mlp.0.weight" in differing(state, calm[1]) for state in states)

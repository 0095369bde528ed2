"""Tables with optimizers and initial values of their own.

A run with deaths comes to the bits of one without.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ecrm.base.errors import DataError, UsageError
from ecrm.checkpoint.folder import CheckpointFolder
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.checkpoint.restore import Restorer
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.placement.initial_values import InitFunction, Uniform
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table
from ecrm.storage.base import NativeStore
from ecrm.testing.simulate.oracle import truth_of
from ecrm.testing.simulate.schedule import draw
from ecrm.testing.simulate.workload import Workload, run_workload
from ecrm.testing.simulated_transport import PhaseFault, SimulatedCluster

ADAM = SparseOptimizer("adam", 0.02, weight_decay=0.1, decoupled=True)
TABLES = (
    Table("a", 40, 8, ADAM, InitFunction(torch.nn.init.normal_)),
    Table("b", 30, 8, initial=Uniform(0.2, 0.3)),
    Table("c", 50, 8, SparseOptimizer("adagrad", 0.05, weight_decay=0.05)),
    Table("d", 20, 4, SparseOptimizer("adam", 0.02, weight_decay=0.1)),
    Table("e", 9, 8, SparseOptimizer("adam", 0.02, weight_decay=0.1, decoupled=True)),
)
WORKLOAD = Workload(
    tables=TABLES, steps=11, falls=True, spares=2, servers=5, rebuild_rows_per_step=1000
)
DEATHS = [PhaseFault(0, 4, "dense"), PhaseFault(5, 6, "update"), PhaseFault(2, 10, "dense")]


def run(workload, faults=(), folder=None, resume=False):
    """The tables reported by a run that all of `faults` happened to, and what ranks returned.

    With `folder` it writes a checkpoint of step 5 there, or is to `resume` from it; lines that
    refuse one come third.
    """
    reported: list[dict[str, str]] = []
    refused: list[str] = []
    cluster = SimulatedCluster(workload.world_size, 1, list(faults))

    def checkpoints(engine):
        return Checkpoints(engine, folder, {}, CheckpointPolicy(workload.steps, every_steps=5))

    def program(transport):
        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name))
        try:
            return run_workload(
                workload,
                transport,
                hooks,
                report=reported.append,
                durable=Restorer(folder, say=refused.append) if resume else None,
                make_checkpoints=checkpoints if folder is not None and not resume else None,
                resume=resume,
            )
        except (DataError, UsageError) as error:
            return error

    outcome = cluster.run(program)
    assert sorted(kill.rank for kill in outcome.killed) == sorted(fault.rank for fault in faults)
    return reported, list(outcome.results.values()), refused


def test_tables_of_one_width_lie_in_a_space_for_each_optimizer():
    spaces = []

    def look(engine: Engine) -> None:
        spaces.append([[table.name for table in space.tables] for space in engine.state.spaces])
        # row, state and mark, in floats
        assert [size // 4 for size in engine.state.record_bytes] == [25, 10, 17, 13]

    truth = truth_of(replace(WORKLOAD, steps=1), after_step=look)
    assert spaces[0] == [["a", "e"], ["b"], ["c"], ["d"]]
    assert set(truth.tables) == set("abcde")


@pytest.mark.parametrize("commit_interval", [1, 3])
@pytest.mark.parametrize(
    "protection",
    [{"k": 3, "m": 1}, {"protection": "replicate", "k": 1}, {"protection": "chain", "k": 1}],
    ids=str,
)
def test_deaths_do_not_change_what_adam_decay_and_falling_rates_come_to(
    protection, commit_interval
):
    workload = replace(WORKLOAD, commit_interval=commit_interval, **protection)
    truth = truth_of(workload)
    reported, outcomes, _ = run(workload, DEATHS)
    assert reported == [truth.tables]
    assert all(outcome.verified.mismatches == 0 for outcome in outcomes)


def test_an_adam_that_counted_its_own_updates_would_not_come_to_the_same(monkeypatch):
    """A step done again would be a later one to it: this is what the tests above can see."""
    right = NativeStore._fused_step

    def counting(self, rows, gradients, step, **more):
        self.count = getattr(self, "count", -1) + 1
        right(self, rows, gradients, self.count, **more)

    monkeypatch.setattr(NativeStore, "_fused_step", counting)
    workload = replace(WORKLOAD, commit_interval=3, falls=False)
    truth = truth_of(workload)
    reported, _, _ = run(workload, DEATHS)
    assert reported and reported[0]["a"] != truth.tables["a"]


def test_each_of_these_numbers_changes_the_rows():
    tables = truth_of(WORKLOAD).tables
    plain = SparseOptimizer("adam", 0.02)
    others = [
        replace(WORKLOAD, falls=False),
        replace(WORKLOAD, tables=(replace(TABLES[0], optimizer=plain), *TABLES[1:])),
        replace(WORKLOAD, tables=(replace(TABLES[0], initial=None), *TABLES[1:])),
    ]
    assert all(truth_of(other).tables["a"] != tables["a"] for other in others)


def test_a_rate_that_cannot_be_ends_all_ranks_alike(monkeypatch):
    monkeypatch.setattr(
        "ecrm.testing.simulate.workload.falling", lambda step: 1.0 if step < 3 else float("inf")
    )
    reported, errors, _ = run(WORKLOAD)
    assert not reported and len(errors) == WORKLOAD.world_size
    assert {str(error) for error in errors} == {
        "the factor on the rows' learning rate is inf at step 3, it must be 0 or more"
    }


def test_a_run_goes_on_from_a_checkpoint_of_the_same_tables_alone(tmp_path):
    """The step of Adam and of falling rates goes on, too."""
    folder = CheckpointFolder(tmp_path)
    run(replace(WORKLOAD, steps=5), folder=folder)
    reported, _, refused = run(WORKLOAD, DEATHS[1:], folder, resume=True)
    assert reported == [truth_of(WORKLOAD).tables] and not refused
    assert reported != [truth_of(replace(WORKLOAD, steps=5)).tables]


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        (
            tuple(replace(table, optimizer=ADAM) for table in TABLES),
            "its row spaces have [49, 30, 50, 20] rows, those of these tables [129, 20]",
        ),
        (
            (*TABLES[:3], replace(TABLES[3], optimizer=None), TABLES[4]),
            "its records of row space 3 have 52 bytes, with this optimizer 24",
        ),
    ],
)
def test_a_checkpoint_of_tables_that_are_laid_out_otherwise_is_refused(tmp_path, tables, problem):
    folder = CheckpointFolder(tmp_path)
    run(replace(WORKLOAD, steps=5), folder=folder)
    *_, refused = run(replace(WORKLOAD, tables=tables), folder=folder, resume=True)
    assert len(refused) == 1 and refused[0].endswith(f"step-00000005 is not used: {problem}")


def test_schedules_draw_optimizers_of_tables_and_leave_the_rest_of_a_seed_as_it_was():
    drawn = [draw(seed, "survivable").workload for seed in range(400)]
    own = [work for work in drawn if any(table.optimizer for table in work.tables)]
    together = [
        work
        for work in own
        if len({(table.dim, table.optimizer) for table in work.tables})
        > len({table.dim for table in work.tables})
    ]
    assert len(own) > 60 and len(together) > 30 and sum(work.falls for work in own) > 25
    assert {table.optimizer.name for work in own for table in work.tables if table.optimizer} == {
        "adam",
        "rowwise_adagrad",
        "sgd",
    }
    assert {type(table.initial) for work in own for table in work.tables} == {
        type(None),
        Uniform,
        InitFunction,
    }

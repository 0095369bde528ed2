"""A script for `ecrm launch` that drives the run of a session by hand: one table, one layer.

Arguments: STEPS [WIDTH], and steps in which something happens on the rank that runs slot 1:
[--fail-in STEP] in the body, [--die-in STEP] by SIGKILL; [--stop-in STEP], in which that rank is
asked to stop.
"""

import argparse
import os
import signal
import time

import torch
from torch import Tensor, nn

from ecrm.engine.hooks import StepAborted, StopRequested
from ecrm.engine.step_input import StepInput
from ecrm.model.module_replica import ModuleReplica
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table
from ecrm.run.rank_run import RankRun
from ecrm.run.session_run import start_run
from ecrm.run.slot_faults import Place
from ecrm.run.started import Wanted

ROWS, DIM, SLOTS = 60, 8, 2

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("width", type=int, nargs="?", default=4)
parser.add_argument("--fail-in", type=int)
parser.add_argument("--die-in", type=int)
parser.add_argument("--stop-in", type=int)
typed = parser.parse_args()

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(DIM, typed.width), nn.ReLU(), nn.Linear(typed.width, 1))
replica = ModuleReplica(model, lambda parameters: torch.optim.Adam(parameters, lr=1e-2))
table = Table("ids", ROWS, DIM, SparseOptimizer("rowwise_adagrad", 0.05))


def rows_of(step: int, slot: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + slot)
    return torch.randperm(ROWS, generator=random)[:10]


def body(rows: Tensor, step: int, slot: int) -> Tensor:
    if (step, slot) == (typed.fail_in, 1):
        raise ValueError("no such sample")
    if (step, slot) == (typed.die_in, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if (step, slot) == (typed.stop_in, 1):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)  # the thread that waits for signals has it by then
    loss = (replica.module(rows).squeeze(1) - rows_of(step, slot) % 2).square().mean()
    loss.backward()
    return loss.detach()


def train_step(run: RankRun) -> None:
    engine = run.engine
    step = engine.step
    engine.enter("input")
    asked = {slot: [rows_of(step, slot)] for slot in engine.slots}
    values = engine.lookup(asked, apply_follows=True)
    engine.enter("forward")
    gradients, contributions = {}, {}
    for slot, (rows,) in values.items():
        rows.requires_grad_()
        replica.begin_slot(slot)
        started.doing(Place(step, slot))
        body(rows, step, slot)
        started.doing("")
        gradients[slot] = [rows.grad / SLOTS]
        contributions[slot] = replica.contribution(SLOTS)
    note = torch.frombuffer(bytearray(b'{"rows": 10.0}'), dtype=torch.uint8)
    notes = dict.fromkeys(contributions, note)
    engine.apply(StepInput(gradients, contributions, notes=notes, commit=step + 1 == typed.steps))
    run.step_finished()


started = start_run(Wanted([table], replica.reset, SLOTS, 3, typed.steps, None))
run = started.run
while True:
    try:
        if run.engine.recovery.stopping:
            raise StopRequested
        if run.engine.step == typed.steps:
            run.keep()
            break
        run.between_steps()
        train_step(run)
    except StopRequested:
        run.stop()
    except StepAborted:
        run.on_recovery()

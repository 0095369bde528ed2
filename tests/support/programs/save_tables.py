"""Under mpirun: train a config, then have torch save its tables, losses and dense parameters.

Arguments: CONFIG FILE KEY=VALUE...
"""

import os
import sys

import torch

from ecrm.config import load_config
from ecrm.engine.hooks import Hooks
from ecrm.engine.table_digest import gather_rows
from ecrm.model.determinism import prepare_torch
from ecrm.protection.registry import make_protection
from ecrm.recipes import train as recipe
from ecrm.run.connect import start_view
from ecrm.run.policy import policy_of
from ecrm.run.started import Started, Wanted
from ecrm.run.summary import flat_state
from ecrm.session.session import Session
from ecrm.storage.base import Store
from ecrm.testing.simulate.session_job import SimulatedRun, session_engine
from ecrm.transport.mpi import MpiTransport

config = load_config(sys.argv[1], sys.argv[3:])
prepare_torch(1)
transport = MpiTransport()
losses: dict[int, float] = {}


class Noting(Session):
    """Notes the loss of each step."""

    def steps(self, *words, **more):
        self.on_commit(self.note)
        yield from super().steps(*words, **more)

    def note(self, step, logged):
        losses[step] = sum(slot["loss"] for slot in logged.values()) / len(logged)


def start(wanted: Wanted) -> Started:
    protection = make_protection(config.protection, config.cluster.servers, durable=False)
    view, policy = start_view(config, protection, {}), policy_of(config, protection)
    engine = session_engine(transport, Hooks(), wanted, view, protection, policy)
    return Started(SimulatedRun(engine))


recipe.Session = Noting
engine = recipe.train(config, start=start)._engine
reporter = engine.view.reporter
(space,) = engine.state.spaces
tables = {}
for table, offset in zip(space.tables, space.offsets, strict=True):
    rows = torch.arange(offset, offset + table.rows)
    values = gather_rows(engine, 0, rows, Store.lookup, reporter)
    if values is not None:
        tables[table.name.rpartition(".")[2]] = values
if engine.rank == reporter:
    in_order = [loss for _, loss in sorted(losses.items())]
    dense = flat_state(engine.state.dense)[0]
    torch.save({"tables": tables, "losses": in_order, "dense": dense}, sys.argv[2])
transport.agree(True)
transport.close()
os._exit(0)

"""Under mpirun: train a config, then have torch save its tables, losses and dense parameters.

Arguments: CONFIG FILE KEY=VALUE...
"""

import os
import sys

import torch

from ecrm.config import load_config
from ecrm.data.dataset import CriteoDataset
from ecrm.engine.hooks import Hooks
from ecrm.engine.table_digest import gather_rows
from ecrm.protection.registry import make_protection
from ecrm.run.connect import start_view
from ecrm.run.ending import Record
from ecrm.run.run_folder import RunFolder
from ecrm.run.traffic import Traffic
from ecrm.storage.base import Store
from ecrm.train.build_engine import build_engine
from ecrm.train.trainer import Trainer
from ecrm.transport.mpi import MpiTransport

config = load_config(sys.argv[1], sys.argv[3:])
torch.set_num_threads(1)
transport = MpiTransport()
dataset = CriteoDataset.open(
    config.data.path, config.model.max_rows_per_table or None, config.data.eval_fraction
)
protection = make_protection(config.protection, config.cluster.servers, durable=False)
engine = build_engine(
    config, transport, protection, start_view(config, protection, {}), dataset, Hooks()
)
losses = []
step_finished = engine.apply


def apply_and_note(*args, **kwargs):
    before = float(engine.state.dense.loss_sum) if engine.state.dense else 0.0
    step_finished(*args, **kwargs)
    losses.append((float(engine.state.dense.loss_sum) if engine.state.dense else 0.0) - before)


engine.apply = apply_and_note
record = Record(RunFolder(None), {}, Traffic(transport))
Trainer(engine, dataset, config, config.train.steps, record).run()
reporter = engine.view.reporter
(space,) = engine.state.spaces
tables = {}
for table, offset in zip(space.tables, space.offsets, strict=True):
    rows = torch.arange(offset, offset + table.rows)
    values = gather_rows(engine, 0, rows, Store.lookup, reporter)
    if values is not None:
        tables[table.name] = values
if engine.rank == reporter:
    torch.save(
        {"tables": tables, "losses": losses, "dense": engine.state.dense.state_tensors[0]},
        sys.argv[2],
    )
transport.agree(True)
transport.close()
os._exit(0)

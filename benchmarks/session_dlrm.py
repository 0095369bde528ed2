"""The session of bench_session.py: an ordinary script that trains TorchRec's DLRM.

    ecrm launch benchmarks/session_dlrm.py ... -- CONFIG [--set a.b=c] [--ids-per-bag 20]

Reads the same config as the built-in trainer and the TorchRec peer (data, model, batch, optimizers,
steps, slots), and trains the same model from the same values on the same batches. The session
itself is run with the options of `ecrm launch`.
"""

from __future__ import annotations

import argparse

from torch.nn.functional import binary_cross_entropy_with_logits

import ecrm
from ecrm.config import load_config
from lib.plain_dlrm import check, dense_adagrad, open_dataset, plain_dlrm, read_batch, tables_of

parser = argparse.ArgumentParser()
parser.add_argument("config")
parser.add_argument("--set", action="append", default=[])
parser.add_argument("--ids-per-bag", type=int, default=1)
typed = parser.parse_args()
config = load_config(typed.config, typed.set)
check("session_dlrm", config, config.slots)
dataset = open_dataset(config)

session = ecrm.Session(
    plain_dlrm(config, tables_of(config, dataset)),
    slots=config.slots,
    seed=config.train.seed,
    dense_optimizer=lambda parameters: dense_adagrad(config, parameters),
)
for batch in session.steps(
    lambda step, slot: read_batch(dataset, config, step, slot, config.slots, typed.ids_per_bag),
    config.train.steps,
):
    logits = session.model(batch.dense_features, batch.sparse_features).squeeze(1)
    loss = binary_cross_entropy_with_logits(logits, batch.labels)
    loss.backward()
    session.log(loss=loss)

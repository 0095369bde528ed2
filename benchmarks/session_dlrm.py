"""The session of several benchmarks: an ordinary script that trains TorchRec's DLRM.

    ecrm launch benchmarks/session_dlrm.py ... -- CONFIG [--set a.b=c] [--ids-per-bag 20]
                                                         [--dot] [--compile] [--bf16]

Reads the same config as the recipe and the TorchRec peer (data, model, batch, optimizers,
steps, slots), and trains the same model from the same values on the same batches. The session
itself is run with the options of `ecrm launch`.

With --dot, the script gives the ids to `ecrm.nn.DotInteraction`. DLRM's SparseArch would copy all
pooled rows once more. With one id a bag no rows are pooled.

With --compile, torch.compile compiles the dense parts. With --bf16, the dense parts run under
torch.autocast in bfloat16. Rows, gradients of rows and parameters stay float32. At the end every
rank with a slot prints the CPU time of a slot's forward and backward pass: the median of the second
half of its steps.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch

import ecrm
from ecrm.config import load_config
from lib.plain_dlrm import check, dense_adagrad, open_dataset, plain_dlrm, read_batch, tables_of

parser = argparse.ArgumentParser()
parser.add_argument("config")
parser.add_argument("--set", action="append", default=[])
parser.add_argument("--ids-per-bag", type=int, default=1)
parser.add_argument("--dot", action="store_true", help="with ecrm.nn.DotInteraction")
parser.add_argument("--compile", action="store_true", help="the dense parts by torch.compile")
parser.add_argument("--bf16", action="store_true", help="the dense parts in bfloat16")
typed = parser.parse_args()
config = load_config(typed.config, typed.set)
check("session_dlrm", config, config.slots)
dataset = open_dataset(config)

model = plain_dlrm(config, tables_of(config, dataset))
cross = ecrm.nn.DotInteraction(model.sparse_arch.embedding_bag_collection)
if typed.compile:
    for part in (model.dense_arch, model.inter_arch, model.over_arch):
        part.compile()


def logits_of(batch: Batch) -> Tensor:
    """One logit for each sample, [B, 1]."""
    dense, bags = batch.dense_features, batch.sparse_features
    if typed.dot:
        return model.over_arch(cross(model.dense_arch(dense), bags))
    return model(dense, bags)


session = ecrm.Session(
    model,
    slots=config.slots,
    seed=config.train.seed,
    dense_optimizer=lambda parameters: dense_adagrad(config, parameters),
)
taken: list[float] = []
for batch in session.steps(
    lambda step, slot: read_batch(dataset, config, step, slot, config.slots, typed.ids_per_bag),
    config.train.steps,
):
    began = time.process_time()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=typed.bf16):
        logits = logits_of(batch)
    loss = binary_cross_entropy_with_logits(logits.float().squeeze(1), batch.labels)
    loss.backward()
    taken.append(time.process_time() - began)
    session.log(loss=loss)
if taken:
    of_half = statistics.median(taken[len(taken) // 2 :])
    print(f"forward and backward of a slot: {1e3 * of_half:.2f} ms of CPU", flush=True)
    if typed.compile:
        from torch._dynamo.utils import counters

        print(f"graphs compiled: {counters['stats']['unique_graphs']}", flush=True)

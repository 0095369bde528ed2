"""The peer: TorchRec DistributedModelParallel over gloo, unprotected, on ECRM's data and model.

    torchrun --nproc-per-node 5 benchmarks/peer_torchrec.py CONFIG OUTPUT [--set a.b=c] [--sharding
    table_wise] [--pipelined] [--bound] [--ids-per-bag 20] [--tell FOLDER]

Reads an ECRM config (data, model, batch, optimizers, steps). Every process is one slot of it, and
embeddings are sharded over all of them. Writes {"samples_per_second", "step_seconds", "logloss",
"plan"} as JSON to OUTPUT; logloss is the mean over all samples of all steps. With --tell, each
process tells of its steps while it runs (lib/told_steps.py).

What makes it a fair peer, and how that was verified (TorchRec 1.8.0, torch 2.13.0):
  same work   Both begin with the same dense parameters and rows, and see the same batches in the
              same slots. The mean loss over a few steps equals ECRM's to five decimals;
              tests/mpi/test_benchmarks.py holds them to that. After that the two drift apart: sums
              are taken in another order, and each step enlarges the difference.
  plan        On CPUs EmbeddingBagCollectionSharder offers data-parallel, table-wise, column-wise
              and table-column-wise sharding; row-wise is for CUDA. The planner, free to choose,
              took table-wise. The CSV has the plan and the most parts of a table. Column-wise, in
              parts of COLUMNS columns, is measured too. Row-wise Adagrad then has a state for each
              part of a row: as much work, but not the same model.
  pipelining  TrainPipelineSparseDist runs on CPUs, without streams: ids of the next batch travel in
              gloo's threads while this one is computed. Losses are the same. It is measured beside
              the plain loop, and the faster counts. Other pipelines were not tried.
  optimizers  Row-wise Adagrad is fused into FBGEMM's backward pass. Dense Adagrad is torch's fused
              form, the fastest on CPUs.
  threads     As many per process as ECRM's ranks have, train.threads.
  cores       Free, or with `--bound` each process with its threads on one core, in turn, as ECRM's
              ranks are where they outnumber the cores. Both are measured, and the faster counts.
  time        The first steps are not counted here; ECRM's median has all steps in it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingType
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from ecrm.config import Config, load_config
from ecrm.data.dataset import CriteoDataset
from ecrm.kernels.hash_uniform import hash_uniform
from lib.plain_dlrm import check, dense_adagrad, open_dataset, plain_dlrm, read_batch, tables_of
from lib.told_steps import ToldSteps

SHARDINGS = {
    "planner": None,
    "table_wise": ShardingType.TABLE_WISE,
    "column_wise": ShardingType.COLUMN_WISE,
}
"""Sharding types that the planner is held to; None leaves it free."""
COLUMNS = 32
"""Least columns of a part of a table; with TorchRec's 128, tables as narrow as these stay whole."""
GIBIBYTE = 1 << 30
WINDOW = 1 << 16


class Training(nn.Module):
    """(loss, the same detached) of a batch: what TorchRec's pipelines want of a model."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(1)
        # DistributedDataParallel averages gradients over the processes, so each takes the mean of
        # its own samples.
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def build(
    config: Config, dataset: CriteoDataset, sharding: str
) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """The sharded model with its sparse optimizer fused into the backward pass; dense optimizer."""
    tables = tables_of(config, dataset)
    training = Training(plain_dlrm(config, tables))
    kind = SHARDINGS[sharding]
    constraints = kind and {
        name: ParameterConstraints(sharding_types=[kind.value], min_partition=COLUMNS)
        for name, _ in dataset.tables
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=dist.get_world_size(), compute_device="cpu", ddr_cap=64 * GIBIBYTE
        ),
        batch_size=config.train.global_batch // dist.get_world_size(),
        constraints=constraints,
    )
    sharders = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(training, sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(
        training, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    start_alike(sharded, tables, config.train.seed)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda parameters: dense_adagrad(config, parameters),
    )
    return sharded, dense


def start_alike(
    sharded: DistributedModelParallel, tables: list[EmbeddingBagConfig], seed: int
) -> None:
    """Give this process's parts of all tables the values that ECRM's rows begin with."""
    numbers = {table.name: number for number, table in enumerate(tables)}
    for key, value in sharded.state_dict().items():
        name = key.removesuffix(".weight").rpartition(".")[2]
        if name not in numbers:
            continue
        table = tables[numbers[name]]
        bound = 1 / math.sqrt(table.num_embeddings)
        parts = [(value, 0, 0)]  # whole, in a data-parallel plan
        if isinstance(value, ShardedTensor):
            parts = [(part.tensor, *part.metadata.shard_offsets) for part in value.local_shards()]
        for part, row, column in parts:
            height, width = part.shape
            for first in range(0, height, WINDOW):
                rows = torch.arange(row + first, row + min(first + WINDOW, height))
                initial = hash_uniform(seed, numbers[name], rows, table.embedding_dim, bound)
                part.detach()[first : first + WINDOW] = initial[:, column : column + width]


def batches(dataset: CriteoDataset, config: Config, ids_per_bag: int) -> Iterator[Batch]:
    """This process's slice of every step's batch, read when it is asked for."""
    for step in range(config.train.steps):
        yield read_batch(dataset, config, step, dist.get_rank(), dist.get_world_size(), ids_per_bag)


def plain_step(
    model: DistributedModelParallel, optimizer: torch.optim.Optimizer, data: Iterator[Batch]
) -> torch.Tensor:
    """One step after the other; returns the loss, detached."""
    optimizer.zero_grad()
    loss, told = model(next(data))
    loss.backward()
    optimizer.step()
    return told


def bind() -> None:
    """Keep this process, and threads that it starts later, to one of the cores that it may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("output", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--sharding", choices=SHARDINGS, default="planner")
    parser.add_argument(
        "--pipelined", action="store_true", help="with TorchRec's TrainPipelineSparseDist"
    )
    parser.add_argument("--bound", action="store_true", help="each process on one core")
    parser.add_argument("--warm-up", type=int, default=5, help="steps not counted")
    parser.add_argument("--ids-per-bag", type=int, default=1)
    parser.add_argument("--tell", type=Path, help="folder for the time and loss of each step")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    config = load_config(arguments.config, arguments.set)
    if arguments.bound:
        bind()
    torch.set_num_threads(config.train.threads)
    dist.init_process_group("gloo")
    check("peer_torchrec", config, dist.get_world_size())
    dataset = open_dataset(config)
    model, optimizer = build(config, dataset, arguments.sharding)
    data = batches(dataset, config, arguments.ids_per_bag)
    told = ToldSteps(arguments.tell, dist.get_rank()) if arguments.tell else None
    pipeline = (
        TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
        if arguments.pipelined
        else None
    )
    seconds, losses = [], []
    for _ in range(config.train.steps):
        began = time.perf_counter()
        loss = pipeline.progress(data) if pipeline else plain_step(model, optimizer, data)
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss))
        # TorchRec only logs it when it finds no module that it can pipeline
        if pipeline and not pipeline._pipelined_modules:
            sys.exit("peer_torchrec: TorchRec pipelined nothing of this model")
        if told:
            told.append(time.time(), losses[-1])
    counted = seconds[arguments.warm_up :]
    loss = torch.tensor(statistics.mean(losses), dtype=torch.float64)
    dist.all_reduce(loss)  # slots are alike in size: the mean over them is that over all samples
    if dist.get_rank() == 0:
        plans = [p for module in model.plan.plan.values() for p in module.values()]
        shardings, parts = {p.sharding_type for p in plans}, max(len(p.ranks or ()) for p in plans)
        result = {
            "samples_per_second": config.train.global_batch / statistics.median(counted),
            "step_seconds": statistics.median(counted),
            "logloss": float(loss) / dist.get_world_size(),
            "plan": f"{'+'.join(sorted(shardings))} of up to {parts}",
        }
        arguments.output.write_text(json.dumps(result) + "\n")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()

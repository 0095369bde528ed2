"""The peer: TorchRec DistributedModelParallel over gloo, unprotected, on the same data, model and batches as ECRM.

    torchrun --nproc-per-node 5 benchmarks/peer_torchrec.py CONFIG OUTPUT [--set a.b=c] [--sharding table_wise]

Reads an ECRM config (data, model, batch, optimizers, steps); every process is one slot of it and embeddings are
sharded over all of them. Writes {"samples_per_second", "step_seconds", "logloss", "plan"} as JSON to OUTPUT.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecrm.config import load_config
from ecrm.data.dataset import CriteoDataset
from ecrm.kernels.hash_uniform import hash_uniform
from ecrm.model.replica import EPSILON

SHARDINGS = {"planner": None, "table_wise": ShardingType.TABLE_WISE, "column_wise": ShardingType.COLUMN_WISE}
"""On CPUs TorchRec shards by table or by column, not by row."""
GIBIBYTE = 1 << 30
WINDOW = 1 << 16


def build(config, dataset, sharding: str) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """The sharded model with its sparse optimizer fused into the backward pass, and its dense optimizer."""
    model = config.model
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=model.embedding_dim, num_embeddings=rows, feature_names=[name])
        for name, rows in dataset.tables
    ]
    torch.manual_seed(config.train.seed)
    bags = EmbeddingBagCollection(tables, device=torch.device("meta"))
    dlrm = DLRM(bags, 13, list(model.bottom_mlp), list(model.top_mlp), dense_device=torch.device("cpu"))
    apply_optimizer_in_backward(
        RowWiseAdagrad, bags.parameters(), {"lr": config.train.sparse_lr, "eps": config.train.sparse_eps}
    )
    kind = SHARDINGS[sharding]
    constraints = kind and {name: ParameterConstraints(sharding_types=[kind.value]) for name, _ in dataset.tables}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu", ddr_cap=64 * GIBIBYTE),
        batch_size=config.train.global_batch // dist.get_world_size(),
        constraints=constraints,
    )
    sharders = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(dlrm, sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(dlrm, device=torch.device("cpu"), plan=plan, sharders=sharders)
    start_alike(sharded, tables, config.train.seed)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=config.train.dense_lr, eps=EPSILON),
    )
    return sharded, dense


def start_alike(sharded: DistributedModelParallel, tables: list[EmbeddingBagConfig], seed: int) -> None:
    """Give this process's parts of all tables the values that ECRM's rows begin with."""
    numbers = {table.name: number for number, table in enumerate(tables)}
    for key, value in sharded.state_dict().items():
        name = key.removesuffix(".weight").rpartition(".")[2]
        if name not in numbers:
            continue
        table, bound = tables[numbers[name]], 1 / math.sqrt(tables[numbers[name]].num_embeddings)
        # A sharded table is parts with a place; one of a data-parallel plan is whole.
        whole = [(value, 0, 0)]
        parts = [(part.tensor, *part.metadata.shard_offsets) for part in value.local_shards()] if isinstance(value, ShardedTensor) else whole
        for part, row, column in parts:
            height, width = part.shape
            for first in range(0, height, WINDOW):
                rows = torch.arange(row + first, row + min(first + WINDOW, height))
                initial = hash_uniform(seed, numbers[name], rows, table.embedding_dim, bound)
                part.detach()[first : first + WINDOW] = initial[:, column : column + width]


def features(ids: torch.Tensor, names: list[str]) -> KeyedJaggedTensor:
    """Ids [B, F] as one id per sample and feature."""
    samples = ids.shape[0]
    return KeyedJaggedTensor(names, ids.t().reshape(-1), lengths=torch.ones(len(names) * samples, dtype=torch.int32))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("output", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--sharding", choices=SHARDINGS, default="planner")
    parser.add_argument("--warm-up", type=int, default=5, help="steps not counted")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    config = load_config(arguments.config, arguments.set)
    torch.set_num_threads(config.train.threads)
    dist.init_process_group("gloo")
    dataset = CriteoDataset.open(config.data.path, config.model.max_rows_per_table or None, config.data.eval_fraction)
    names = [name for name, _ in dataset.tables]
    model, dense_optimizer = build(config, dataset, arguments.sharding)
    rank, slots = dist.get_rank(), dist.get_world_size()
    seconds, losses = [], []
    for step in range(config.train.steps):
        began = time.perf_counter()
        dense, ids, labels = dataset.batch_for(step, rank, slots, config.train.global_batch)
        logits = model(dense, features(ids, names)).squeeze(1)
        # DistributedDataParallel averages gradients over the processes, so each takes the mean of its own samples.
        loss = binary_cross_entropy_with_logits(logits, labels)
        dense_optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss.detach()))
    counted = seconds[arguments.warm_up :]
    loss = torch.tensor(statistics.mean(losses), dtype=torch.float64)
    dist.all_reduce(loss)  # slots are alike in size: the mean over them is that over all samples
    if rank == 0:
        shardings = {p.sharding_type for module in model.plan.plan.values() for p in module.values()}
        result = {
            "samples_per_second": config.train.global_batch / statistics.median(counted),
            "step_seconds": statistics.median(counted),
            "logloss": float(loss) / slots,
            "plan": "+".join(sorted(shardings)),
        }
        arguments.output.write_text(json.dumps(result) + "\n")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()

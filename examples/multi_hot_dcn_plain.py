"""TorchRec's DLRM_DCN on bags of many ids, sharded by DistributedModelParallel.

    torchrun --nproc-per-node 2 examples/multi_hot_dcn_plain.py

The customers are made here. `multi_hot_dcn.py` is the same with tables that survive killed ranks.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM_DCN
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

parser = argparse.ArgumentParser()
parser.add_argument("--customers", type=int, default=20_000)
typed = parser.parse_args()
BATCH, DIM = 128, 16
ROWS = {"bought": 2000, "returned": 1000, "city": 50}
MOST = {"bought": 20, "returned": 5, "city": 1}
"""Tables, their rows, and the most ids of a bag."""


class Customers(Dataset):
    """Dense features of customers, a bag of ids for each table, and whether they come back."""

    def __init__(self, count: int, seed: int) -> None:
        worth, random = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
        self.dense = torch.randn(count, 4, generator=random)
        self.bags, logits = [], self.dense[:, 0].clone()
        for table, rows in ROWS.items():
            ids = torch.randint(rows, (count, MOST[table]), generator=random)
            sizes = torch.randint(1, MOST[table] + 1, (count,), generator=random)
            in_bag = torch.arange(MOST[table]) < sizes.unsqueeze(1)
            logits += (torch.randn(rows, generator=worth)[ids] * in_bag).sum(1)
            self.bags.append((ids, sizes))
        self.labels = torch.bernoulli(logits.sigmoid(), generator=random)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple:
        bags = [ids[number, : sizes[number]] for ids, sizes in self.bags]
        return self.dense[number], bags, self.labels[number]


def collate(samples: list) -> Batch:
    dense, bags, labels = zip(*samples)
    by_table = [bag for of_table in zip(*bags) for bag in of_table]
    lengths = torch.tensor([len(bag) for bag in by_table])
    kjt = KeyedJaggedTensor(list(ROWS), torch.cat(by_table), lengths=lengths)
    return Batch(torch.stack(dense), kjt, torch.stack(labels))


train, held_out = Customers(typed.customers, seed=1), Customers(2000, seed=2)

torch.manual_seed(0)  # of the layers' first weights
model = DLRM_DCN(
    EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name]
            )
            for name, rows in ROWS.items()
        ],
    ),
    dense_in_features=4,
    dense_arch_layer_sizes=[32, DIM],
    over_arch_layer_sizes=[32, 1],
    dcn_num_layers=2,
    dcn_low_rank_dim=8,
)
apply_optimizer_in_backward(RowWiseAdagrad, model.sparse_arch.parameters(), {"lr": 0.1})

dist.init_process_group("gloo")
model = DistributedModelParallel(model, device=torch.device("cpu"))
dense = dict(in_backward_optimizer_filter(model.named_parameters()))
optimizer = KeyedOptimizerWrapper(dense, lambda ps: torch.optim.AdamW(ps, lr=1e-3))

for batch in DataLoader(train, BATCH, sampler=DistributedSampler(train), collate_fn=collate):
    optimizer.zero_grad()
    logits = model(batch.dense_features, batch.sparse_features).squeeze(1)
    loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
    loss.backward()
    clip_grad_norm_(dense.values(), 1.0)
    optimizer.step()

model.eval()
scores, labels = [], []
with torch.no_grad():
    for batch in DataLoader(held_out, BATCH, collate_fn=collate):
        scores.append(model(batch.dense_features, batch.sparse_features).squeeze(1))
        labels.append(batch.labels)
loss = F.binary_cross_entropy_with_logits(torch.cat(scores), torch.cat(labels))
if dist.get_rank() == 0:
    print(f"log loss of held-out customers: {loss:.3f} (0.693 by guessing)")
dist.destroy_process_group()

"""A two-tower model: what a user has read, and an item, by an EmbeddingCollection of items.

    ecrm launch examples/two_tower.py --servers 4 --trainers 2 --kill 1@60

An EmbeddingCollection gives the rows of a sequence. The model pools them itself, and the user tower
is fed with their mean. The users are made here. They read items of one topic, whose number is the
item's modulo TOPICS. The model is not told, and learns it.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import ecrm
from ecrm.data.metrics import auc

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
typed = parser.parse_args()
ITEMS, TOPICS, MOST_READ, DIM = 2000, 20, 12, 16


class Reads(Dataset):
    """Items that a user has read, an item that is offered, and whether the user takes it."""

    def __init__(self, count: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def draw(below: int, *shape: int) -> torch.Tensor:
            return torch.randint(below, shape, generator=random)

        topic, other = draw(TOPICS, count, 1), draw(TOPICS, count, 1)
        self.read = topic + TOPICS * draw(ITEMS // TOPICS, count, MOST_READ)
        self.sizes = 1 + draw(MOST_READ, count)
        self.labels = draw(2, count, 1)
        offered = torch.where(self.labels == 1, topic, other)
        self.offered = offered + TOPICS * draw(ITEMS // TOPICS, count, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        read = self.read[number, : self.sizes[number]]
        return read, self.offered[number], self.labels[number].float()


def collate(samples: list) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    read, offered, labels = zip(*samples)
    lengths = torch.tensor([len(ids) for ids in (*read, *offered)])
    ids = torch.cat((*read, *offered))
    return KeyedJaggedTensor(["read", "offered"], ids, lengths=lengths), torch.cat(labels)


class TwoTower(nn.Module):
    """How well an item fits to what a user has read, a logit for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.items = EmbeddingCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingConfig(
                    name="item",
                    num_embeddings=ITEMS,
                    embedding_dim=DIM,
                    feature_names=["read", "offered"],
                )
            ],
        )
        self.user_tower = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.item_tower = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.items(kjt)
        read = rows["read"]
        mean = read.to_padded_dense().sum(1) / read.lengths().unsqueeze(1)
        return (self.user_tower(mean) * self.item_tower(rows["offered"].values())).sum(1)


torch.manual_seed(0)  # of the layers' first weights
model = TwoTower()
apply_optimizer_in_backward(RowWiseAdagrad, model.items.parameters(), {"lr": 0.1})
session = ecrm.Session(
    model, slots=2, dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01)
)
# Functions make the samples, on ranks with batches alone: servers and spares make none.
train = ecrm.Indexed(lambda: Reads(50_000, seed=1), 256, collate, size=50_000)
held_out = ecrm.Indexed(lambda: Reads(2000, seed=2), 256, collate, size=2000)


@session.every(50)
def evaluate() -> None:
    session.model.eval()
    for kjt, labels in session.eval_batches(held_out):
        session.gather(scores=session.model(kjt), labels=labels)
    if session.is_main:
        found = {name: tensor.numpy() for name, tensor in session.gathered.items()}
        area = auc(found["labels"], found["scores"])
        print(f"AUC of held-out users: {area:.3f} (0.5 by guessing)")


for kjt, labels in session.steps(train, typed.steps):
    loss = F.binary_cross_entropy_with_logits(session.model(kjt), labels)
    loss.backward()
    session.log(loss=loss)
session.save("model.pt")

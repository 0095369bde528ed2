"""Matrix factorization of MovieLens-100k with biases, with tables that survive killed ranks.

    ecrm launch examples/movielens_svd.py --servers 3 --trainers 2 -k 2 -m 1 --kill 1@60 -- RATINGS

`movielens.py` says how to get RATINGS. `movielens_svd_plain.py` is the same in torch alone. The
numbers are the defaults of SVD in Surprise: 100 factors, 20 epochs, rate 0.005, decay 0.02. The
decay is a part of the loss, so only rows of rated users and movies decay. The ratings of a fold of
three are held out. The mean RMSE of the folds is published: 0.944.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from movielens import MOVIES, USERS, fold
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm

parser = argparse.ArgumentParser()
parser.add_argument("ratings", help="the Parquet file of the ratings")
parser.add_argument("--fold", type=int, choices=(0, 1, 2), default=0, help="held out; the seed")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--wire-dtype", choices=("float32", "bfloat16"), default="float32")
typed = parser.parse_args()
SLOTS, BATCH, FACTORS, RATE, DECAY = 2, 2048, 100, 0.005, 0.02
"""Batches of a step, their size, and the numbers of the model."""

train, held_out = fold(typed.ratings, typed.fold)
mean = float(train[:, 2].mean())


def begin(table: Tensor) -> None:
    """First values of rows: a bias of 0, then the factors."""
    nn.init.normal_(table, 0, 0.1)
    nn.init.zeros_(table[:, 0])


def collate(ratings: Sequence[np.ndarray]) -> tuple[KeyedJaggedTensor, Tensor]:
    user, movie, stars, _ = torch.from_numpy(np.stack(ratings)).t()
    lengths = torch.ones(2 * len(stars), dtype=torch.int64)
    ids = KeyedJaggedTensor(["user", "movie"], torch.cat([user, movie]), lengths=lengths)
    return ids, stars.float()


model = EmbeddingCollection(
    tables=[
        EmbeddingConfig(
            name=f"t_{name}",
            num_embeddings=rows,
            embedding_dim=1 + FACTORS,
            feature_names=[name],
            init_fn=begin,
        )
        for name, rows in (("user", USERS), ("movie", MOVIES))
    ],
    device=torch.device("meta"),
)
apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": RATE})
session = ecrm.Session(
    model,
    slots=SLOTS,
    seed=typed.fold,
    average_gradients=False,
    wire_dtype=getattr(torch, typed.wire_dtype),
)


def rows_of(ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
    found = session.model(ids)
    return found["user"].values(), found["movie"].values()


def guess(user: Tensor, movie: Tensor) -> Tensor:
    return mean + user[:, 0] + movie[:, 0] + (user[:, 1:] * movie[:, 1:]).sum(1)


batches = ecrm.Indexed(train, BATCH, collate, seed=typed.fold, epochs=typed.epochs)
for ids, stars in session.steps(batches, batches.steps(typed.epochs, SLOTS)):
    user, movie = rows_of(ids)
    errors = (guess(user, movie) - stars).square().sum()
    loss = 0.5 * (errors + DECAY * (user.square().sum() + movie.square().sum()))
    loss.backward()
    session.log(loss=loss / len(stars))

for ids, stars in session.eval_batches(ecrm.Indexed(held_out, 4096, collate)):
    session.gather(squares=(guess(*rows_of(ids)).clamp(1, 5) - stars).square())
if session.is_main:
    print(f"RMSE: {session.gathered['squares'].mean().sqrt():.6f}")

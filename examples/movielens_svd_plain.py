"""Matrix factorization of MovieLens-100k with biases, in torch alone: one of three folds.

    python examples/movielens_svd_plain.py RATINGS --fold 0

`movielens.py` says how to get RATINGS. `movielens_svd.py` is the same with tables that survive
killed ranks. Numbers are the defaults of SVD in Surprise.
"""

import argparse

import torch
from movielens import MOVIES, USERS, fold
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("ratings", help="the Parquet file of the ratings")
parser.add_argument("--fold", type=int, choices=(0, 1, 2), default=0, help="held out; the seed")
parser.add_argument("--epochs", type=int, default=20)
typed = parser.parse_args()
FACTORS, BATCH, RATE, DECAY = 100, 4096, 0.005, 0.02

torch.manual_seed(typed.fold)
train, held_out = map(torch.from_numpy, fold(typed.ratings, typed.fold))
mean = train[:, 2].float().mean()

users, movies = (nn.Embedding(rows, 1 + FACTORS) for rows in (USERS, MOVIES))
for table in (users, movies):
    nn.init.normal_(table.weight, 0, 0.1)
    nn.init.zeros_(table.weight[:, 0])  # the bias
optimizer = torch.optim.SGD([users.weight, movies.weight], lr=RATE)


def guess(user: torch.Tensor, movie: torch.Tensor) -> torch.Tensor:
    return mean + user[:, 0] + movie[:, 0] + (user[:, 1:] * movie[:, 1:]).sum(1)


for _ in range(typed.epochs):
    for batch in DataLoader(train, BATCH, shuffle=True):
        user, movie = users(batch[:, 0]), movies(batch[:, 1])
        errors = (guess(user, movie) - batch[:, 2]).square().sum()
        loss = 0.5 * (errors + DECAY * (user.square().sum() + movie.square().sum()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    found = guess(users(held_out[:, 0]), movies(held_out[:, 1])).clamp(1, 5)
    print(f"RMSE: {(found - held_out[:, 2]).square().mean().sqrt():.6f}")

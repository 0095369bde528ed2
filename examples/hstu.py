"""A small sequence model with the layers of HSTU, for `movielens_hstu*.py`.

A layer has no softmax: SiLU weighs the earlier movies of a user, and gates the result. The next
movie is scored by the dot product with the rows of all movies.

Legend: B users, n places of a padded history, D floats of a row, M movies.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from movielens import MOVIES, ratings
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

DIM, HEADS, LAYERS, LENGTH, BATCH, RATE, BETAS = 32, 2, 2, 50, 64, 1e-2, (0.9, 0.999)
NO_TARGET = -100
"""A place without a next movie, as `cross_entropy` marks such places."""


def histories(path: str, held_out: bool) -> list[np.ndarray]:
    """The last movies of every user in the order of time, with or without the very last movie."""
    found = ratings(path)
    found = found[np.lexsort((found[:, 3], found[:, 0]))]
    ends = np.cumsum(np.bincount(found[:, 0]))[:-1]
    movies = np.split(found[:, 1], ends)
    return [each[-LENGTH - 1 :] if held_out else each[-LENGTH - 2 : -1] for each in movies]


def collate(movies: Sequence[np.ndarray]) -> tuple[KeyedJaggedTensor, Tensor]:
    """Ids of the histories and of all movies, and the next movie at each place, int64 [B, n]."""
    sizes = [len(each) - 1 for each in movies]
    ids = np.concatenate([*(each[:-1] for each in movies), np.arange(MOVIES)])
    all_movies = [MOVIES] + [0] * (len(sizes) - 1)  # the first sample of the batch has them
    lengths = torch.tensor(sizes + all_movies)
    targets = torch.full((len(sizes), max(sizes)), NO_TARGET)
    for row, each in zip(targets, movies):
        row[: len(each) - 1] = torch.from_numpy(each[1:])
    return KeyedJaggedTensor(["history", "movie"], torch.from_numpy(ids), lengths=lengths), targets


class Layer(nn.Module):
    """Attention by SiLU with a bias for each distance, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.inputs, self.output = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, DIM)
        self.distances = nn.Parameter(torch.zeros(HEADS, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        """From [B, n, D] to [B, n, D]; a place sees itself and earlier places."""
        users, places, _ = x.shape
        gate, *parts = F.silu(self.inputs(self.before(x))).chunk(4, dim=-1)
        value, query, key = (part.view(users, places, HEADS, -1).transpose(1, 2) for part in parts)
        place = torch.arange(places)
        distance = (place[:, None] - place).clamp(min=0)
        scores = query @ key.transpose(2, 3) + self.distances[:, distance]
        weights = F.silu(scores).tril() / places
        mixed = (weights @ value).transpose(1, 2).reshape(x.shape)
        return x + self.output(self.after(mixed) * gate)


class Hstu(nn.Module):
    """Scores of all movies for the next place of each history."""

    def __init__(self, device: str) -> None:
        super().__init__()
        config = EmbeddingConfig(
            name="t_movie",
            num_embeddings=MOVIES,
            embedding_dim=DIM,
            feature_names=["history", "movie"],
            init_fn=lambda table: nn.init.normal_(table, 0, 0.02),
        )
        self.rows = EmbeddingCollection([config], device=torch.device(device))
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Logits, float32 [B, n, M]."""
        found = self.rows(ids)
        history, movies = found["history"], found["movie"].values()
        padded = history.to_padded_dense(int(history.lengths().max()))
        return self.norm(self.layers(padded)) @ movies.t()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy over all places with a next movie."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)


def ranks(logits: Tensor, targets: Tensor) -> Tensor:
    """The place of each user's last movie among all movies, from 0: float32 [B]."""
    users, last = torch.arange(len(targets)), (targets != NO_TARGET).sum(1) - 1
    scores = logits[users, last]
    right = scores[users, targets[users, last]]
    return (scores > right[:, None]).sum(1).float()


def tell(found: Tensor) -> None:
    """Print the share of hits among the first ten, and the hits' mean gain."""
    hits = found < 10
    print(f"HR@10: {hits.float().mean():.6f}")
    print(f"NDCG@10: {(hits / (found + 2).log2()).mean():.6f}", flush=True)

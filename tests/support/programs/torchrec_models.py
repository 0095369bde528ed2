"""A script that trains one of TorchRec's own models, unmodified: train.py NAME OUTPUT [STEPS].

Every rank that gets to the end writes OUTPUT.PID.json: what it was told that steps have logged.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.modules.mlp import MLP
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import ecrm

META, DIM, DENSE = torch.device("meta"), 8, 5
FEATURES = {"site": 60, "words": 90, "ad": 25}


def tables(names: Iterable[str] = FEATURES) -> EmbeddingBagCollection:
    """Tables of one width; `words` has up to 5 ids a sample, and takes their mean."""
    return EmbeddingBagCollection(
        device=META,
        tables=[
            EmbeddingBagConfig(
                name=f"t_{name}",
                num_embeddings=FEATURES[name],
                embedding_dim=DIM,
                feature_names=[name],
                pooling=PoolingType.MEAN if name == "words" else PoolingType.SUM,
            )
            for name in names
        ],
    )


class TwoTower(nn.Module):
    """Two collections, each under layers of its own; the score is the product of both."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.candidate = tables(("site", "words")), tables(("ad",))
        self.query_tower = MLP(2 * DIM + DENSE, [16, DIM])
        self.candidate_tower = MLP(DIM, [16, DIM])

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        query = torch.cat((self.query(features).values(), dense), 1)
        scores = self.query_tower(query) * self.candidate_tower(self.candidate(features).values())
        return scores.sum(1, keepdim=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "DLRM": lambda: DLRM(tables(), DENSE, [16, DIM], [16, 1]),
    "DLRM_DCN": lambda: DLRM_DCN(tables(), DENSE, [16, DIM], [16, 1], 2, 4),
    "DLRM_Projection": lambda: DLRM_Projection(
        tables(), DENSE, [16, DIM], [16, 1], [16, 2 * DIM], [16, 2 * DIM]
    ),
    "SimpleDeepFMNN": lambda: SimpleDeepFMNN(DENSE, tables(), 12, 6),
    "TwoTower": TwoTower,
}


def batch_of(step: int, slot: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """A batch of 6 samples that only (step, slot) decide."""
    random, size = torch.Generator().manual_seed(77 * step + slot), 6
    lengths = torch.ones(3, size, dtype=torch.int64)
    lengths[1] = torch.randint(0, 6, (size,), generator=random)
    ids = [
        torch.randint(0, rows, (int(some.sum()),), generator=random)
        for rows, some in zip(FEATURES.values(), lengths, strict=True)
    ]
    features = KeyedJaggedTensor(list(FEATURES), torch.cat(ids), lengths=lengths.view(-1))
    labels = torch.randint(0, 2, (size,), generator=random).float()
    return torch.randn(size, DENSE, generator=random), features, labels


def train(name: str, steps: int, **options: Any) -> tuple[ecrm.Session, dict[int, Any]]:
    """Train a model in a session with these `options`: the session, and the log of every step."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for module in list(model.modules()):
        if isinstance(module, EmbeddingBagCollection):
            apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.05})
    session = ecrm.Session(
        model,
        slots=2,
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        **options,
    )
    logged: dict[int, Any] = {}

    def note(step: int, values: Any) -> None:
        assert step not in logged, "a step is told once"
        logged[step] = values

    session.on_commit(note)
    for dense, features, labels in session.steps(batch_of, steps):
        scores = session.model(dense, features).squeeze(1)
        # SimpleDeepFMNN ends in a sigmoid
        loss = (
            F.binary_cross_entropy(scores, labels)
            if name == "SimpleDeepFMNN"
            else F.binary_cross_entropy_with_logits(scores, labels)
        )
        loss.backward()
        session.log(loss=loss)
    return session, logged


def main(name: str, output: str, steps: str = "12") -> None:
    session, logged = train(name, int(steps))
    session.save(output)
    Path(f"{output}.{os.getpid()}.json").write_text(json.dumps(logged))


if __name__ == "__main__":
    main(*sys.argv[1:])

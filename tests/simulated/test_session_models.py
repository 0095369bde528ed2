"""TorchRec's own models, unmodified, in a session: kills change no bit of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from ecrm.session.run import Wanted
from ecrm.session.session import Session
from ecrm.transport.simulated import PhaseFault
from support.sessions import Layout, Left, Train, run

META, DIM, DENSE, STEPS = torch.device("meta"), 8, 5, 6
FEATURES = {"site": 60, "words": 90, "ad": 25}


def tables() -> EmbeddingBagCollection:
    """Three tables of one width; `words` has up to 5 ids a sample, and takes their mean."""
    return EmbeddingBagCollection(
        device=META,
        tables=[
            EmbeddingBagConfig(
                name=f"t_{name}",
                num_embeddings=rows,
                embedding_dim=DIM,
                feature_names=[name],
                pooling=PoolingType.MEAN if name == "words" else PoolingType.SUM,
            )
            for name, rows in FEATURES.items()
        ],
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "DLRM": lambda: DLRM(tables(), DENSE, [16, DIM], [16, 1]),
    "DLRM_DCN": lambda: DLRM_DCN(tables(), DENSE, [16, DIM], [16, 1], 2, 4),
    "DLRM_Projection": lambda: DLRM_Projection(
        tables(), DENSE, [16, DIM], [16, 1], [16, 2 * DIM], [16, 2 * DIM]
    ),
    "SimpleDeepFMNN": lambda: SimpleDeepFMNN(DENSE, tables(), 12, 6),
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


def script(name: str) -> Train:
    def train(start: Callable[[Wanted], Any]) -> Session:
        torch.manual_seed(0)
        model = MODELS[name]()
        bags = [m for m in model.modules() if isinstance(m, EmbeddingBagCollection)]
        for bag in bags:
            apply_optimizer_in_backward(RowWiseAdagrad, bag.parameters(), {"lr": 0.05})
        session = Session(
            model,
            slots=2,
            dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
            start=start,
        )
        session.delivered = []
        session.on_commit(lambda step, logged: session.delivered.append((step, logged)))
        for dense, features, labels in session.steps(batch_of, STEPS):
            scores = session.model(dense, features).squeeze(1)
            # SimpleDeepFMNN ends in a sigmoid
            loss = (
                F.binary_cross_entropy(scores, labels)
                if name == "SimpleDeepFMNN"
                else F.binary_cross_entropy_with_logits(scores, labels)
            )
            loss.backward()
            session.log(loss=loss)
        return session

    return train


@functools.cache
def calm(name: str) -> Left:
    return run(train=script(name))


@pytest.mark.parametrize("name", MODELS)
def test_a_server_and_a_trainer_die_and_no_bit_changes(name):
    left = calm(name)
    assert left.mismatches == left.deaths == 0 and len(left.logged) == STEPS
    for faults in (
        [PhaseFault(1, 3, "update")],
        [PhaseFault(4, 2, "forward")],
        [PhaseFault(2, 1, "parity"), PhaseFault(5, 4, "dense")],
    ):
        killed = run(faults, Layout(spares=2), script(name))
        assert killed.deaths == len(faults) and killed.mismatches == 0
        assert (killed.tables, killed.dense) == (left.tables, left.dense)
        assert killed.logged == left.logged[-len(killed.logged) :]


def test_models_and_steps_change_what_comes_out():
    assert len({tuple(calm(name).tables.values()) for name in MODELS}) == len(MODELS)

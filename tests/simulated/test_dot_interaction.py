"""DLRM's interaction in a session: TorchRec's numbers, the same bits whoever dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import InteractionArch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import ecrm
from ecrm.base.errors import UsageError
from ecrm.model.determinism import prepared_torch
from ecrm.run.lone_run import run_alone
from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault
from support.sessions import Layout, run

DIM, FEATURES = 8, 4


@pytest.mark.parametrize("batch", [0, 1, 7])
def test_pooled_rows_give_what_torchrecs_gives(batch):
    random = torch.Generator().manual_seed(3)
    dense = torch.randn(batch, DIM, generator=random, requires_grad=True)
    sparse = torch.randn(batch, FEATURES, DIM, generator=random, requires_grad=True)
    ours, theirs = ecrm.nn.DotInteraction()(dense, sparse), InteractionArch(FEATURES)(dense, sparse)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn(theirs.shape, generator=random)
    for mine, its in zip(
        torch.autograd.grad(ours, (dense, sparse), weights),
        torch.autograd.grad(theirs, (dense, sparse), weights),
        strict=True,
    ):
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("batch", [0, 5])
@pytest.mark.parametrize("pooled", [torch.float32, torch.bfloat16])
def test_under_autocast_inputs_of_16_bits_become_float32(pooled, batch):
    random = torch.Generator().manual_seed(3)
    dense = torch.randn(batch, DIM, generator=random).bfloat16().requires_grad_()
    sparse = torch.randn(batch, FEATURES, DIM, generator=random).to(pooled).requires_grad_()
    cross = ecrm.nn.DotInteraction()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = cross(dense, sparse)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, cross(dense.float(), sparse.float()))
    ours.sum().backward()
    assert (dense.grad.dtype, sparse.grad.dtype) == (torch.bfloat16, pooled)
    if batch:
        with pytest.raises(TypeError, match=r"dense is torch\.bfloat16, needed: torch\.float32"):
            cross(dense, sparse)


def tables(dims: tuple[int, ...] = (DIM,) * FEATURES) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"t{n}", embedding_dim=dim, num_embeddings=30, feature_names=[f"f{n}"]
        )
        for n, dim in enumerate(dims)
    ]


def ids(step: int, slot: int, lengths: Tensor, samples: int = 5) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(100 * step + slot)
    values = torch.randint(0, 30, (int(lengths.sum()),), generator=random)
    return KeyedJaggedTensor([f"f{n}" for n in range(FEATURES)], values, lengths=lengths)


ONE = torch.ones(5 * FEATURES, dtype=torch.int64)
RAGGED = torch.arange(5 * FEATURES) % 3


class Crossed(nn.Module):
    def __init__(self, bags: EmbeddingBagCollection, from_ids: bool = True) -> None:
        super().__init__()
        self.bags, self.from_ids = bags, from_ids
        self.dense = nn.Linear(3, DIM)
        self.cross = ecrm.nn.DotInteraction(bags if from_ids else None)
        self.over = nn.Linear(DIM + FEATURES * (FEATURES + 1) // 2, 1)

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> Tensor:
        sparse = kjt if self.from_ids else self.bags(kjt).values().view(len(dense), -1, DIM)
        return self.over(self.cross(self.dense(dense), sparse)).squeeze(1)


def training(lengths: Tensor, from_ids: bool = True, steps: int = 6) -> Callable[[Any], Session]:
    def train(start: Any) -> Session:
        torch.manual_seed(1)
        model = Crossed(EmbeddingBagCollection(tables(), device=torch.device("meta")), from_ids)
        apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.1})
        session = Session(
            model, slots=2, dense_optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), start=start
        )
        session.delivered = []
        for kjt in session.steps(lambda step, slot: ids(step, slot, lengths), steps):
            dense = torch.rand(5, 3)
            F.mse_loss(model(dense, kjt), torch.ones(5)).backward()
        return session

    return train


@pytest.mark.parametrize("lengths", [ONE, RAGGED], ids=["one id a bag", "ragged bags"])
def test_a_session_of_it_is_exact_whoever_dies(lengths):
    calm = run([], Layout(), training(lengths))
    for faults in ([PhaseFault(1, 3, "update")], [PhaseFault(4, 2, "forward")]):
        killed = run(faults, Layout(), training(lengths))
        assert killed.deaths == 1
        assert (killed.tables, killed.dense) == (calm.tables, calm.dense), faults


def test_rows_and_pooled_rows_give_the_same_numbers():
    with prepared_torch(threads=1):
        models = [training(ONE, from_ids, 3)(run_alone).model for from_ids in (True, False)]
    for one, other in zip(*(model.dense.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other)


def test_weights_in_this_process_are_pooled_and_wrong_uses_refused():
    bags = EmbeddingBagCollection(tables())
    dense, kjt = torch.rand(5, DIM), ids(0, 0, ONE)
    out = ecrm.nn.DotInteraction(bags)(dense, kjt)
    theirs = InteractionArch(FEATURES)(dense, bags(kjt).values().view(5, -1, DIM))
    torch.testing.assert_close(out, theirs)
    with pytest.raises(UsageError, match="got ids, and has no collection: make it by"):
        ecrm.nn.DotInteraction()(dense, kjt)
    other = EmbeddingBagCollection(tables((8, 8, 8, 4)))
    with pytest.raises(UsageError, match=r"rows of \[4, 8\] floats, dense rows 8"):
        ecrm.nn.DotInteraction(other)(dense, kjt)

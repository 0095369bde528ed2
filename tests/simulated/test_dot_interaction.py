"""DLRM's interaction in a session: TorchRec's numbers, the trainer's bits, whoever dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, InteractionArch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import ecrm
from ecrm.config import load_config
from ecrm.data.dataset import CriteoDataset
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.engine.table_digest import table_digests
from ecrm.errors import UsageError
from ecrm.model.determinism import prepared_torch
from ecrm.model.replica import EPSILON
from ecrm.model.slot_batch import backward, forward
from ecrm.placement.assignment import initial_view
from ecrm.protection.none import NoProtection
from ecrm.session.alone import run_alone
from ecrm.session.session import Session
from ecrm.train.build_engine import build_engine, dense_of
from ecrm.train.trainer import CriteoBatches
from ecrm.transport.alone import LoneTransport
from ecrm.transport.simulated import PhaseFault
from support.commands import ecrm as command
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


STEPS = 3


def trainer_of(config: Any, data: CriteoDataset) -> Engine:
    """The built-in trainer's engine after STEPS steps."""
    protection = NoProtection(shards=1)
    view = initial_view("colocated", protection.shape, 1, 0, config.slots, 1)
    engine = build_engine(config, LoneTransport(), protection, view, data, Hooks())
    size = config.train.global_batch
    batches = CriteoBatches(engine, data, size, 0)
    for step in range(STEPS):
        mine = {slot: batches.batch(step, slot) for slot in engine.slots}
        values = engine.lookup({slot: [b.rows] for slot, b in mine.items()}, apply_follows=True)
        done = {
            slot: backward(dense_of(engine), forward(dense_of(engine), b, values[slot][0], size))
            for slot, b in mine.items()
        }
        engine.apply(
            {slot: [gradients] for slot, (gradients, _) in done.items()},
            {slot: contribution for slot, (_, contribution) in done.items()},
            commit=True,
        )
    return engine


def session_of(config: Any, data: CriteoDataset) -> Session:
    """TorchRec's DLRM, in a session, with the interaction from the rows."""
    torch.manual_seed(config.train.seed)
    bags = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=config.model.embedding_dim,
                num_embeddings=rows,
                feature_names=[name],
            )
            for name, rows in data.tables
        ],
        device=torch.device("meta"),
    )
    model = DLRM(bags, 13, list(config.model.bottom_mlp), list(config.model.top_mlp))
    adagrad = {"lr": config.train.sparse_lr, "eps": config.train.sparse_eps}
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), adagrad)
    cross = ecrm.nn.DotInteraction(bags)
    session = Session(
        model,
        slots=config.slots,
        seed=config.train.seed,
        dense_optimizer=lambda ps: torch.optim.Adagrad(
            ps, lr=config.train.dense_lr, eps=EPSILON, fused=True
        ),
        start=run_alone,
    )

    def batch(step: int, slot: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
        dense, found, labels = data.batch_for(step, slot, config.slots, config.train.global_batch)
        names = [name for name, _ in data.tables]
        lengths = torch.ones(found.numel(), dtype=torch.int32)
        return dense, KeyedJaggedTensor(names, found.t().reshape(-1), lengths=lengths), labels

    for dense, kjt, labels in session.steps(batch, STEPS):
        crossed = cross(model.dense_arch(dense), kjt)
        logits = model.over_arch(crossed).squeeze(1)
        F.binary_cross_entropy_with_logits(logits, labels).backward()
    return session


def test_a_session_of_the_same_dlrm_comes_to_the_trainers_bits(tmp_path: Path):
    text, folder = tmp_path / "rows.txt", tmp_path / "data"
    command("generate", "criteo", "--rows", "500", "--seed", "1", "--output", str(text), check=True)
    command("prepare", "criteo", str(text), "--output", str(folder), check=True)
    given = [f"data.path={folder}", f"train.steps={STEPS}", "train.epochs=0"]
    config = load_config("quickstart", [*given, "train.global_batch=64", "train.slots=2"])
    data = CriteoDataset.open(config.data.path, None, config.data.eval_fraction)
    with prepared_torch(threads=1):
        trainer, session = trainer_of(config, data), session_of(config, data)
    rows = {name.split(".")[-1]: d for name, d in table_digests(session.engine, 0).items()}
    assert rows == table_digests(trainer, 0) and len(rows) == 26
    ours = [p for p in session.model.parameters() if not p.is_meta]
    theirs = list(dense_of(trainer).module.parameters())
    assert len(ours) == len(theirs) == 12
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))

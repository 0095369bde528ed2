"""Sessions on simulated ranks: a user's model and loop, with kills, and what is left of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from ecrm.base.allocate import CPU
from ecrm.checkpoint.keeper import Checkpoints
from ecrm.device.imitation import IMITATED_GPU
from ecrm.engine.dense import DenseReplica
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import EnginePolicy, Hooks, StepAborted
from ecrm.engine.rollback import Durable
from ecrm.engine.table_digest import table_digests
from ecrm.placement.assignment import initial_view
from ecrm.protection.base import Protection
from ecrm.protection.erasure import ErasureProtection
from ecrm.run.sealed import meet
from ecrm.run.started import Started, Wanted
from ecrm.session.session import Session
from ecrm.testing.simulate.session_job import SimulatedRun, session_engine
from ecrm.testing.simulated_transport import PhaseFault, SimulatedCluster
from ecrm.transport.base import Transport
from support.gpus import Gpu

META = torch.device("meta")


ROWS = 40


class Small(nn.Module):
    """A table of ROWS rows, t, under batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.layers(self.bags(ids).values()).squeeze(1)


@dataclass
class Batch:
    dense: Tensor
    kjt: KeyedJaggedTensor
    label: Tensor


class TwoTower(nn.Module):
    """Bags of several widths, a shared feature, weights, sequences, BatchNorm and Dropout."""

    def __init__(self, device: torch.device = META) -> None:
        super().__init__()
        bag = EmbeddingBagConfig
        self.ebc = EmbeddingBagCollection(
            device=device,
            tables=[
                bag(
                    name="user", num_embeddings=50, embedding_dim=8, feature_names=["u", "friends"]
                ),
                bag(
                    name="item",
                    num_embeddings=90,
                    embedding_dim=16,
                    feature_names=["clicked"],
                    pooling=PoolingType.MEAN,
                ),
                bag(name="shop", num_embeddings=90, embedding_dim=4, feature_names=["clicked"]),
            ],
        )
        self.weighted = EmbeddingBagCollection(
            device=device,
            is_weighted=True,
            tables=[bag(name="tag", num_embeddings=30, embedding_dim=12, feature_names=["tags"])],
        )
        self.sequence = EmbeddingCollection(
            device=device,
            tables=[
                EmbeddingConfig(
                    name="page", num_embeddings=40, embedding_dim=8, feature_names=["pages"]
                )
            ],
        )
        self.norm = nn.BatchNorm1d(48 + 8)
        self.mlp = nn.Sequential(
            nn.Linear(56 + 4, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 1)
        )

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> Tensor:
        pages = self.sequence(kjt)["pages"]
        samples = torch.arange(len(dense), device=dense.device)
        summed = torch.zeros(len(dense), 8, device=dense.device).index_add(
            0, torch.repeat_interleave(samples, pages.lengths()), pages.values()
        )
        bags = [self.ebc(kjt).values(), self.weighted(kjt).values(), summed]
        return self.mlp(torch.cat([self.norm(torch.cat(bags, 1)), dense], 1)).squeeze(1)


def two_tower() -> nn.Module:
    model = TwoTower()
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.05})
    apply_optimizer_in_backward(torch.optim.Adam, model.weighted.parameters(), {"lr": 0.01})
    apply_optimizer_in_backward(torch.optim.SGD, model.sequence.parameters(), {"lr": 0.1})
    return model


KEYS = {"u": 50, "friends": 50, "clicked": 90, "tags": 30, "pages": 40}


def batch_of(step: int, slot: int, size: int = 8) -> Batch:
    """A batch that only (step, slot) decide; in step 3 nobody has tags."""
    random = torch.Generator().manual_seed(1000 * step + slot)
    lengths = [torch.ones(size, dtype=torch.int64)]
    lengths += [torch.randint(0, 4, (size,), generator=random) for _ in range(4)]
    if step == 3:
        lengths[3].zero_()
    ids = [
        torch.randint(0, rows, (int(some.sum()),), generator=random)
        for rows, some in zip(KEYS.values(), lengths, strict=True)
    ]
    kjt = KeyedJaggedTensor(
        list(KEYS),
        torch.cat(ids),
        lengths=torch.cat(lengths),
        weights=torch.rand(sum(map(len, ids)), generator=random),
    )
    return Batch(
        torch.randn(size, 4, generator=random),
        kjt,
        torch.randint(0, 2, (size,), generator=random).float(),
    )


@dataclass(frozen=True)
class Layout:
    """Where a session runs, and how it is protected."""

    servers: int = 4
    trainers: int = 2
    spares: int = 1
    slots: int = 2
    commit_interval: int = 1
    protection: Callable[[int], Protection] = lambda servers: ErasureProtection(servers, 3, 1)
    gpu: bool = False
    """Whether rows are on a GPU; the test's script says where the model is."""
    durable: Callable[[], Durable | None] = lambda: None
    """What outlives the ranks, made on each."""
    checkpoints: Callable[[Engine], Checkpoints | None] = lambda engine: None
    """What writes checkpoints, made on each rank."""
    checks: bool = False
    """Whether slots of first steps are computed twice, as many as the script wants."""
    resumes: bool = False
    """Whether the run goes on from what is durable."""
    whole_tables: bool = False
    """Whether small tables lie whole on shards."""
    wrap: Callable[[Transport], Transport] = lambda transport: transport
    """What the engine is given for a rank's transport."""

    @property
    def world(self) -> int:
        return self.servers + self.trainers + self.spares


def starter(transport: Transport, hooks: Hooks, layout: Layout) -> Callable[[Wanted], Started]:
    """What a session is started by on a simulated rank."""

    def start(wanted: Wanted) -> Started:
        protection = layout.protection(layout.servers)
        view = initial_view(
            "dedicated", protection.shape, layout.trainers, layout.spares, wanted.slots, 2
        )
        policy = EnginePolicy(commit_interval=layout.commit_interval, dense_replicas=2)
        engine = session_engine(
            layout.wrap(transport),
            hooks,
            wanted,
            view,
            protection,
            policy,
            device=IMITATED_GPU if layout.gpu else CPU,
            durable=layout.durable(),
            whole_tables=layout.whole_tables,
        )
        if layout.resumes:
            engine.recovery.resume()
        simulated = SimulatedRun(engine, checkpoints=layout.checkpoints(engine))
        return Started(simulated, check_steps=wanted.check_steps if layout.checks else 0)

    return start


Train = Callable[[Callable[[Wanted], Any]], Session]
"""A user's script, given what starts its session; returns the session when its loop is over."""


def train_two_tower(
    start: Callable[[Wanted], Any],
    steps: int = 10,
    prepare: Callable[[Session], None] = lambda session: None,
    device: torch.device | None = None,
    moves_ids: bool = False,
) -> Session:
    """The script of most tests; `prepare` gets the session before it trains."""
    torch.manual_seed(7)
    session = Session(
        two_tower(),
        slots=2,
        seed=3,
        dense_optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2),
        scheduler=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps),
        before_step=lambda ps: nn.utils.clip_grad_norm_(ps, 0.5),
        sparse=lambda batch: batch.kjt,
        sparse_scheduler=lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
        device=device,
        start=start,
    )
    session.delivered = []  # type: ignore[attr-defined]
    session.on_commit(lambda step, logged: session.delivered.append((step, logged)))  # type: ignore[attr-defined]
    prepare(session)
    for batch in session.steps(batch_of, steps):
        here = session.device
        kjt = batch.kjt.to(here) if moves_ids else batch.kjt
        logits = session.model(batch.dense.to(here), kjt)
        loss = F.binary_cross_entropy_with_logits(logits, batch.label.to(here))
        loss.backward()
        session.log(loss=loss)
    return session


@dataclass(frozen=True)
class Left:
    """What is left of a run: digests of tables and of dense states, wrong stripes, and so on."""

    tables: Mapping[str, str]
    dense: frozenset[str]
    mismatches: int
    deaths: int
    logged: tuple[Any, ...] = field(repr=False)
    evaluated: tuple[Any, ...] = ()


def run(
    faults: Sequence[PhaseFault] = (),
    layout: Layout = Layout(),
    train: Train = train_two_tower,
    seed: int = 5,
    on_gpu: Gpu | None = None,
) -> Left:
    """Train on simulated ranks, with those killed that `faults` name.

    `on_gpu` is the GPU to be used, if any.
    """
    cluster = SimulatedCluster(layout.world, seed, list(faults), most_calls=300_000)

    def program(transport: Transport) -> tuple[Any, ...]:
        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name))
        return left_on_rank(train(starter(transport, hooks, layout)))

    def with_a_gpu(transport: Transport) -> tuple[Any, ...]:
        with nullcontext() if on_gpu is None else on_gpu.used():
            return program(transport)

    results = cluster.run(with_a_gpu).results
    values = list(results.values())
    (evaluated,) = {value[5] for value in values}  # every rank has the same
    (tables,) = [value[0] for value in values if value[0] is not None]
    logged = max((value[4] for value in values if value[1]), key=len)
    return Left(
        tables,
        frozenset(value[1] for value in values if value[1] is not None),
        max(value[2] for value in values),
        max(value[3] for value in values),
        told(logged),
        evaluated,
    )


def left_on_rank(session: Session) -> tuple[Any, ...]:
    """Collective: of one rank tables, dense digest, wrong stripes, deaths, log and evaluations."""
    engine = session._engine
    while True:
        try:
            meet(engine, "the end of the script")
            engine.rebuild_all()
            verified = engine.verify_parity()
            with engine.recovery.recovering():
                tables = table_digests(engine, engine.view.reporter)
                engine.state.transport.agree(True)
            break
        except StepAborted:
            continue
    dense = None if engine.state.dense is None else dense_digest(engine.state.dense)
    deaths = sum(len(failure.ranks) for failure in engine.state.failures.failures)
    evaluated = tuple(getattr(session, "evaluated", {}).items())
    return tables, dense, verified.mismatches, deaths, session.delivered, evaluated


def dense_digest(replica: DenseReplica) -> str:
    """A digest of all that a dense replica holds."""
    digest = hashlib.sha256()
    for tensor in replica.state_tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def told(delivered: Sequence[tuple[int, Mapping[int, Mapping[str, float]]]]) -> tuple[Any, ...]:
    """What a session was told of its steps, as something that can be compared."""
    return tuple(
        (step, tuple(sorted((s, tuple(v.items())) for s, v in slots.items())))
        for step, slots in delivered
    )

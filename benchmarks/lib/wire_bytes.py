"""A session on simulated ranks, each on a host of its own, and the bytes that each rank sends.

Bytes do not depend on the machine: the ranks are threads of one process, and messages are counted
as the transports pack them.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from ecrm.engine.hooks import EnginePolicy, Hooks
from ecrm.placement.assignment import initial_view
from ecrm.protection import routing
from ecrm.protection.erasure import ErasureProtection
from ecrm.run.started import Started, Wanted
from ecrm.session.session import Session
from ecrm.testing.simulate.session_job import SimulatedRun, session_engine
from ecrm.testing.simulated_transport import SimulatedCluster
from ecrm.transport import wire
from ecrm.transport.base import Transport, WrappedTransport
from ecrm.transport.message import Part, Received

REQUESTS, ROWS, SUMS, OF_ROWS, OF_BAGS, LISTS, PARITY, OTHER = (
    "requests",
    "rows",
    "sums of bags",
    "gradients of rows",
    "gradients of bags",
    "lists of bags",
    "parity deltas",
    "dense and other",
)
KINDS = {
    routing.ROWS: ROWS,
    routing.SUMS: SUMS,
    routing.GRADIENTS: OF_ROWS,
    routing.BAG_GRADIENTS: OF_BAGS,
    routing.BAGS: LISTS,
}
"""Kinds of bytes by the kind of a group. Requests have the kind of rows, and are int64."""


def by_kind(parts: Sequence[Part]) -> Counter[str]:
    """The bytes of a message by kind, without the few words of heads.

    Of an undisturbed step, with a commit in every step: deltas follow the parts attached.
    """
    found: Counter[str] = Counter()
    attached, kind = len(parts), OTHER
    if parts and isinstance(parts[0], tuple) and len(parts[0]) == 1 and parts[0][0] % 2 == 0:
        attached = parts[0][0]
    for place, part in enumerate(parts):
        if isinstance(part, tuple):
            kind = KINDS.get(part[0], OTHER) if place <= attached else PARITY
            continue
        asks = kind == ROWS and part.element_size() == 8
        found[REQUESTS if asks else kind] += wire.padded(part.numel() * part.element_size())
    return found


class CountedTransport(WrappedTransport):
    """A transport that counts bytes of exchanges with other ranks, by kind, in `sent`."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.sent: Counter[str] = Counter()

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> dict[int, list[Received]]:
        """As in `Transport`."""
        for rank, parts in outgoing.items():
            if rank != self.rank:
                self.sent.update(by_kind(parts))
        return self.inner.exchange(outgoing)


@dataclass(frozen=True)
class Case:
    """A session of the benchmark: tables of `rows` rows, a feature each, and its cluster.

    `bags` are the ids of a bag, by table.
    """

    rows: tuple[int, ...]
    dim: int
    samples: int
    bags: tuple[int, ...]
    ranks: int
    k: int
    m: int = 1


@dataclass(frozen=True)
class Way:
    """How the rows of a case lie and travel: the settings that do not change the batches."""

    whole_tables: bool = False
    factors: bool = False
    wire_dtype: torch.dtype = torch.float32
    commit_interval: int = 1

    @property
    def placement(self) -> str:
        """The placement in words."""
        if self.factors:
            return "tables, with pooling_factors"
        return "tables" if self.whole_tables else "rows"


VALUES = 1_000_000
"""Most values of a column, as of the rows that bench_session.py generates for its tables."""


def drawn(case: Case, step: int, slot: int) -> KeyedJaggedTensor:
    """The ids of a slot by Zipf's law, with exponents from 1.05 to 1.2 over the tables."""
    random = np.random.default_rng((step, slot))
    ids = []
    for number, (rows, bag) in enumerate(zip(case.rows, case.bags, strict=True)):
        power = -0.05 - 0.15 * number / max(len(case.rows) - 1, 1)
        share = random.random(case.samples * bag)
        values = ((VALUES**power - 1) * share + 1) ** (1 / power)
        ids.append(values.astype(np.int64) * 0x9E3779B1 % (1 << 32) % rows)
    lengths = torch.tensor(case.bags).repeat_interleave(case.samples)
    keys = [f"f{number}" for number in range(len(case.rows))]
    return KeyedJaggedTensor(keys, torch.from_numpy(np.concatenate(ids)), lengths=lengths)


class _Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"t{number}",
                num_embeddings=rows,
                embedding_dim=case.dim,
                feature_names=[f"f{number}"],
            )
            for number, rows in enumerate(case.rows)
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.scale = nn.Parameter(torch.ones(case.dim))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        pooled = self.bags(ids).values().view(len(ids.lengths()) // len(ids.keys()), -1, 1)
        width = self.scale.numel()
        return (pooled.view(len(pooled), -1, width) * self.scale).sum((1, 2)).tanh()


@dataclass(frozen=True)
class Sent:
    """Bytes of a commit interval by rank, by kind, its steps, and the sum of the first losses."""

    ranks: tuple[Counter[str], ...]
    steps: int
    loss: float

    def mean(self, kind: str) -> float:
        """Bytes of a kind in a step, of a mean rank."""
        return sum(each[kind] for each in self.ranks) / len(self.ranks) / self.steps

    @property
    def most(self) -> float:
        """Bytes of all kinds in a step, of the rank that sends most."""
        return max(each.total() for each in self.ranks) / self.steps


Draw = Callable[[Case, int, int], KeyedJaggedTensor]
"""(case, step, slot) -> the ids of a slot in a step."""


COMPARED = 3
"""First steps whose losses are compared."""


def sent(case: Case, way: Way, draw: Draw = drawn) -> Sent:
    """The bytes of the second commit interval; ranks are server and trainer in one."""
    steps = max(2 * way.commit_interval + 1, COMPARED)
    factors = {f"t{number}": bag for number, bag in enumerate(case.bags)} if way.factors else {}

    def program(transport: Transport) -> tuple[Counter[str], float]:
        counted = CountedTransport(transport)
        protection = ErasureProtection(case.ranks, case.k, case.m)

        def start(wanted: Wanted) -> Started:
            shape = protection.shape
            view = initial_view("colocated", shape, case.ranks, 0, wanted.slots, 2)
            policy = EnginePolicy(commit_interval=way.commit_interval, dense_replicas=2)
            engine = session_engine(
                counted, Hooks(), wanted, view, protection, policy, whole_tables=way.whole_tables
            )
            return Started(SimulatedRun(engine), check_steps=0)

        torch.manual_seed(0)
        model = _Model(case)
        apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.01})
        session = Session(
            model,
            slots=case.ranks,
            seed=1,
            dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            wire_dtype=way.wire_dtype,
            pooling_factors=factors,
            start=start,
        )
        marks: list[Counter[str]] = []
        losses: list[Any] = []
        batches = session.steps(lambda step, slot: draw(case, step, slot), steps)
        for ids in batches:
            marks.append(Counter(counted.sent))
            loss = session.model(ids).sum()
            loss.backward()
            losses.append(float(loss))
        every = way.commit_interval
        return marks[2 * every] - marks[every], sum(losses[:COMPARED])

    found = SimulatedCluster(case.ranks, 1, (), most_calls=300_000).run(program).results
    gc.collect()  # the ranks' rows lie in cycles: else the next way has its gigabytes beside them
    return Sent(
        tuple(count for count, _ in found.values()),
        way.commit_interval,
        sum(loss for _, loss in found.values()),
    )

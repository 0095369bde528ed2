"""A session on simulated ranks, each on a host of its own, and the bytes that each rank sends.

Bytes do not depend on the machine: the ranks are threads of one process, and messages are counted
as the transports pack them.
"""

from __future__ import annotations

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
    """A session of the benchmark: tables of `rows` rows, a feature each, and its cluster."""

    rows: tuple[int, ...]
    dim: int
    samples: int
    ids_per_bag: int
    ranks: int
    k: int
    m: int = 1


VALUES = 1_000_000
"""Most values of a column, as of the rows that bench_session.py generates for its tables."""


def drawn(case: Case, step: int, slot: int) -> KeyedJaggedTensor:
    """The ids of a slot by Zipf's law, with exponents from 1.05 to 1.2 over the tables."""
    random = np.random.default_rng((step, slot))
    count = case.samples * case.ids_per_bag
    ids = []
    for number, rows in enumerate(case.rows):
        power = -0.05 - 0.15 * number / max(len(case.rows) - 1, 1)
        share = random.random(count)
        values = ((VALUES**power - 1) * share + 1) ** (1 / power)
        ids.append(values.astype(np.int64) * 0x9E3779B1 % (1 << 32) % rows)
    lengths = torch.full((len(case.rows) * case.samples,), case.ids_per_bag)
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
    """Bytes of a step by rank, by kind, and the sum of the model's logged losses."""

    ranks: tuple[Counter[str], ...]
    loss: float

    def mean(self, kind: str) -> float:
        """Bytes of a kind, of a mean rank."""
        return sum(each[kind] for each in self.ranks) / len(self.ranks)

    @property
    def most(self) -> int:
        """Bytes of all kinds of the rank that sends most."""
        return max(each.total() for each in self.ranks)


Draw = Callable[[Case, int, int], KeyedJaggedTensor]
"""(case, step, slot) -> the ids of a slot in a step."""


def sent(case: Case, whole_tables: bool, draw: Draw = drawn, steps: int = 3) -> Sent:
    """The bytes of the last step but one; ranks are server and trainer in one."""

    def program(transport: Transport) -> tuple[Counter[str], float]:
        counted = CountedTransport(transport)
        protection = ErasureProtection(case.ranks, case.k, case.m)

        def start(wanted: Wanted) -> Started:
            shape = protection.shape
            view = initial_view("colocated", shape, case.ranks, 0, wanted.slots, 2)
            policy = EnginePolicy(commit_interval=1, dense_replicas=2)
            engine = session_engine(
                counted, Hooks(), wanted, view, protection, policy, whole_tables=whole_tables
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
        return marks[-1] - marks[-2], sum(losses)

    found = SimulatedCluster(case.ranks, 1, (), most_calls=300_000).run(program).results
    return Sent(
        tuple(count for count, _ in found.values()), sum(loss for _, loss in found.values())
    )

"""Bags summed at the shard of their rows give the same model, with kills and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from ecrm.base.errors import EcrmError
from ecrm.placement import stripes, table_places
from ecrm.protection import routing
from ecrm.protection.chain import ChainProtection
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.pooled import ShardBags
from ecrm.protection.replicate import ReplicateProtection
from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault
from ecrm.testing.simulated_transport.outcome import ProgramFailed
from ecrm.transport.base import WrappedTransport
from support.sessions import Layout, Train, run

STEPS, SAMPLES, DIM = 6, 8, 16
FEATURES = {"a": 60, "b": 60, "c": 7, "d": 60, "single": 60}
"""Rows of the table of a feature. Table a has a second feature, and c too few rows for sums."""
SEEN: Counter[int] = Counter()


class Counts(WrappedTransport):
    """Counts the groups of all messages, by kind, in `SEEN`."""

    def exchange(self, outgoing):
        for parts in outgoing.values():
            SEEN.update(part[0] for part in parts if isinstance(part, tuple) and len(part) > 3)
        return self.inner.exchange(outgoing)


def batch_of(step, slot):
    random = torch.Generator().manual_seed(100 * step + slot)
    keys = ["a", "again", *list(FEATURES)[1:]]
    lengths = torch.randint(4, 9, (len(keys), SAMPLES), generator=random)
    lengths[1] = torch.randint(0, 9, (SAMPLES,), generator=random)  # some bags are empty
    lengths[-1] = 1
    rows = [FEATURES["a"], *FEATURES.values()]
    ids = [
        torch.randint(0, count, (int(each.sum()),), generator=random)
        for count, each in zip(rows, lengths)
    ]
    return KeyedJaggedTensor(keys, torch.cat(ids), lengths=lengths.view(-1))


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=DIM,
                feature_names=["a", "again"] if name == "a" else [name],
            )
            for name, rows in FEATURES.items()
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.top = nn.Linear(DIM * 6, 1)

    def forward(self, ids):
        return self.top(self.bags(ids).values()).squeeze(1).sin()


class Twice(Bags):
    """Looks up the same bags twice: autograd adds the gradients of rows."""

    def forward(self, ids):
        return super().forward(ids) * self.bags(ids).values().sum(1)


class Moved(Bags):
    """Looks up the batch's ids in a new KeyedJaggedTensor, as scripts make for a device."""

    def forward(self, ids):
        moved = ids.to(torch.device("cpu"))
        assert moved is not ids
        return super().forward(moved)


class Reordered(Bags):
    """Looks up ids in a new KeyedJaggedTensor."""

    def forward(self, ids):
        keys = list(reversed(ids.keys()))
        return super().forward(ids.permute([ids.keys().index(key) for key in keys]))


def script(
    model: type[nn.Module] = Bags,
    skips: bool = False,
    pooling_factors: Mapping[str, float] = MappingProxyType({}),
) -> Train:
    def train(start):
        torch.manual_seed(7)
        module = model()
        apply_optimizer_in_backward(RowWiseAdagrad, module.bags.parameters(), {"lr": 0.1})
        session = Session(
            module,
            slots=2,
            seed=3,
            dense_optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
            pooling_factors=pooling_factors,
            start=start,
        )
        session.delivered = []
        session.on_commit(lambda step, logged: session.delivered.append((step, logged)))
        for ids in session.steps(batch_of, STEPS):
            if skips and session.step == 2 and int(ids.values()[0]) % 2:
                session.skip()
                continue
            loss = session.model(ids).square().mean()
            loss.backward()
            session.log(loss=loss)
        return session

    return train


ROWS = Layout(wrap=Counts)
TABLES = replace(ROWS, whole_tables=True)


def trained(layout=TABLES, faults=(), train=None):
    """What is left of a run, and how many groups of sums and of gradients of bags were sent."""
    SEEN.clear()
    left = run(faults, layout, train or script())
    assert left.mismatches == 0 and left.deaths == len(faults)
    return (left.tables, left.dense, left.logged), SEEN[routing.SUMS], SEEN[routing.BAG_GRADIENTS]


@pytest.fixture(scope="module")
def by_rows():
    left, *sums = trained(ROWS)
    assert sums == [0, 0]
    return left


def test_sums_of_bags_give_the_bits_of_rows(by_rows):
    left, sums, gradients = trained()
    assert left == by_rows
    # three tables for sums, on different shards or not, for two slots
    assert STEPS * 2 <= sums == gradients


def test_known_lookups_move_tables_and_change_no_bit(by_rows):
    homes = []

    def noted(spaces, shards, place=table_places.place_tables):
        found = place(spaces, shards)
        homes.append(found[0].homes)
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stripes, "place_tables", noted)
        train = script(pooling_factors={"a": 6, "d": 20, "single": 30})
        assert trained(train=train, faults=[PhaseFault(2, 3, "update")])[0] == by_rows
        assert trained()[0] == by_rows
    assert len(set(homes)) == 2, "the factors have moved tables, alike on all ranks"


def test_sums_in_another_order_are_noticed(by_rows, monkeypatch):
    def backwards(self, rows, place, rounded_to):
        ends = self.lengths.cumsum(0)
        return torch.stack(
            [
                sum(rows[place[at]] for at in reversed(of_bag.tolist())) + torch.zeros(DIM)
                for of_bag in self.places.tensor_split(ends[:-1])
            ]
        )

    monkeypatch.setattr(ShardBags, "pooled", backwards)
    left, sums, _ = trained()
    assert sums and left != by_rows


@pytest.mark.parametrize("phase", ["lookup", "forward", "update", "parity", "commit"])
@pytest.mark.parametrize("killed", [0, 2, 4])
def test_a_kill_changes_no_bit(by_rows, phase, killed):
    left, sums, _ = trained(faults=[PhaseFault(killed, 3, phase)])
    assert left == by_rows and sums


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 2), (2, 1)])
def test_m_kills_and_other_stripes(by_rows, k, m):
    layout = replace(TABLES, spares=2, protection=lambda servers: ErasureProtection(servers, k, m))
    faults = [PhaseFault(1, 2, "update"), PhaseFault(3, 4, "parity")]
    left, sums, _ = trained(layout, faults[:m])
    assert left == by_rows and sums


@pytest.mark.parametrize(
    ("protection", "some"), [(ChainProtection, True), (ReplicateProtection, False)]
)
def test_copies_of_rows_at_slots_need_rows(by_rows, protection, some):
    layout = replace(TABLES, protection=lambda servers: protection(servers, 2))
    left, sums, _ = trained(layout, [PhaseFault(1, 3, "update")])
    assert left == by_rows and bool(sums) == some


def test_servers_with_rows_on_a_gpu_sum_too(by_rows, gpu):
    on_gpu = replace(TABLES, gpu=True)
    SEEN.clear()
    left = run([PhaseFault(1, 3, "update")], on_gpu, script(), on_gpu=gpu)
    assert SEEN[routing.SUMS]
    calm = by_rows
    if not gpu.is_imitated:
        other = run((), replace(on_gpu, whole_tables=False), script(), on_gpu=gpu)
        calm = other.tables, other.dense, other.logged
    assert (left.tables, left.dense, left.logged) == calm


def test_a_slot_that_sits_out_sends_no_gradient_of_bags():
    left, *_ = trained(ROWS, train=script(skips=True))
    other, sums, gradients = trained(train=script(skips=True))
    assert left == other and gradients < sums


def test_bags_looked_up_twice_have_gradients_of_rows():
    left, *_ = trained(ROWS, train=script(Twice))
    other, sums, gradients = trained(train=script(Twice))
    assert left == other and sums and not gradients


def test_ids_in_a_new_object_are_those_of_the_batch(by_rows):
    left, sums, gradients = trained(train=script(Moved))
    assert left == by_rows and sums == gradients > 0


def test_another_use_of_the_rows_is_refused_by_name():
    left, *_ = trained(ROWS, train=script(Reordered))
    assert left
    with pytest.raises((EcrmError, ProgramFailed), match=r"were summed on their\s+servers") as told:
        trained(train=script(Reordered))
    assert "cluster.placement" in str(told.value)

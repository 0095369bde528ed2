"""Rows and gradients of two bytes: one model on all layouts, and the model of plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import embedding_bag, linear
from torchrec import (
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ecrm.protection import routing
from ecrm.protection.chain import ChainProtection
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.pooled import ShardBags
from ecrm.protection.replicate import ReplicateProtection
from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault
from ecrm.transport.base import WrappedTransport
from ecrm.transport.message import Picked
from support.sessions import Layout, run
from support.two_bytes import DIM, SLOTS, SUMS, Model, batch_of, first_state, script

KINDS: dict[int, set[torch.dtype]] = {}


class Dtypes(WrappedTransport):
    """Notes the dtypes of all rows, sums and gradients sent, by the kind of their groups."""

    def exchange(self, outgoing):
        for parts in outgoing.values():
            for head, part in zip(parts, parts[1:]):
                if isinstance(head, tuple) and len(head) > 3 and not isinstance(part, tuple):
                    tensor = part.source if isinstance(part, Picked) else part
                    KINDS.setdefault(head[0], set()).add(tensor.dtype)
        return self.inner.exchange(outgoing)


ROWS = Layout(slots=SLOTS, wrap=Dtypes)
TABLES = replace(ROWS, whole_tables=True)


def trained(layout=ROWS, faults=(), wire_dtype=torch.bfloat16):
    KINDS.clear()
    left = run(faults, layout, script(wire_dtype))
    assert left.mismatches == 0 and left.deaths == len(faults)
    return left.tables, left.dense, left.logged


@pytest.fixture(scope="module")
def by_rows():
    return trained()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_bytes_travel_and_no_layout_changes_a_bit(dtype):
    by_rows = trained(wire_dtype=dtype)
    kinds = (routing.ROWS, routing.GRADIENTS)
    # requests are int64, and ranks with slots but without shards get rows of other hosts only
    assert [KINDS[kind] - {torch.int64} for kind in kinds] == [{dtype}] * 2
    assert trained(TABLES, wire_dtype=dtype) == by_rows
    kinds = (routing.SUMS, routing.BAG_GRADIENTS)
    assert [KINDS[kind] for kind in kinds] == [{dtype}] * 2
    fewer = replace(TABLES, servers=3, trainers=1, protection=lambda n: ErasureProtection(n, 2, 1))
    assert trained(fewer, wire_dtype=dtype) == by_rows


@pytest.mark.parametrize("layout", [ROWS, TABLES], ids=["rows", "tables"])
@pytest.mark.parametrize(("killed", "phase"), [(0, "update"), (4, "parity")])
def test_a_kill_changes_no_bit(by_rows, layout, killed, phase):
    assert trained(layout, [PhaseFault(killed, 3, phase)]) == by_rows


@pytest.mark.parametrize("protection", [ChainProtection, ReplicateProtection])
def test_copies_of_rows_at_slots_are_whole(by_rows, protection):
    layout = replace(TABLES, protection=lambda servers: protection(servers, 2))
    assert trained(layout, [PhaseFault(1, 3, "update")]) == by_rows
    rows = torch.float32 if protection is ReplicateProtection else torch.bfloat16
    assert KINDS[routing.ROWS] - {torch.int64} == {rows}


def test_servers_with_rows_on_a_gpu_round_too(by_rows, gpu):
    on_gpu = replace(TABLES, gpu=True)
    left = run([PhaseFault(1, 3, "update")], on_gpu, script(), on_gpu=gpu)
    calm = by_rows
    if not gpu.is_imitated:
        other = run((), replace(on_gpu, whole_tables=False), script(), on_gpu=gpu)
        calm = other.tables, other.dense, other.logged
    assert (left.tables, left.dense, left.logged) == calm


def test_unrounded_sums_are_noticed(by_rows, monkeypatch):
    right = ShardBags.gradients
    monkeypatch.setattr(ShardBags, "gradients", lambda self, *rest: right(self, *rest[:-1]))
    assert trained(TABLES) != by_rows


class Both(Model):
    """Sums bags of a table, and then looks the same rows up one by one."""

    def __init__(self, device):
        super().__init__(device)
        config = EmbeddingConfig(
            name="pair", num_embeddings=7, embedding_dim=DIM, feature_names=["c"]
        )
        self.pairs = EmbeddingCollection(tables=[config], device=device)

    def forward(self, ids):
        loss = super().forward(ids)
        rows = self.pairs(ids)["c"].values()
        assert torch.equal(rows, rows.bfloat16().float())
        return loss + rows.sin().mean()


def test_rows_are_read_one_by_one_after_bags():
    torch.manual_seed(7)
    module = Both(torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, module.bags.parameters(), {"lr": 0.3})
    apply_optimizer_in_backward(torch.optim.SGD, module.words.parameters(), {"lr": 0.3})
    apply_optimizer_in_backward(torch.optim.SGD, module.pairs.parameters(), {"lr": 0.3})
    session = Session(
        module,
        slots=1,
        dense_optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        wire_dtype=torch.bfloat16,
    )
    for ids in session.steps(batch_of, 2):
        session.model(ids).backward()


class Cast(torch.autograd.Function):
    """A cast to bfloat16 and back, of values and of their gradients."""

    @staticmethod
    def forward(ctx, values):
        return values.bfloat16().float()

    @staticmethod
    def backward(ctx, gradients):
        return gradients.bfloat16().float()


def test_the_definition_is_that_of_casts_in_plain_torch():
    lone = script(steps=2)(None)
    state = first_state()
    for step in range(2):
        summed = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for slot in range(SLOTS):
            for name, gradient in gradients_of(state, batch_of(step, slot)).items():
                share = gradient / SLOTS
                summed[name] += share if "top" in name else share.bfloat16().float()
        for name, gradient in summed.items():
            state[name] = state[name] - (0.1 if "top" in name else 0.3) * gradient
    found = lone.state_dict()
    assert found.keys() == state.keys()
    # a last bit of a sum in another order may round to the next number of 16 bits
    assert far_off(found, state) < 0.01
    exact = script(torch.float32, steps=2)(None).state_dict()
    assert far_off(exact, state) > 0.3


def test_an_evaluation_has_the_scores_of_a_served_model_with_casts():
    session = script(steps=1)(None)
    for ids in session.eval_batches([batch_of(9, 0), batch_of(9, 1)]):
        session.gather(bags=session.model.bags(ids).values())
    served = Model(torch.device("cpu"))
    served.load_state_dict(session.state_dict())
    exact = served.bags(batch_of(9, 0)).values()
    for part in served.bags.embedding_bags.values():
        part.weight.data = part.weight.data.bfloat16().float()
    cast = [served.bags(batch_of(9, slot)).values().bfloat16().float() for slot in (0, 1)]
    assert torch.equal(session.gathered["bags"], torch.cat(cast))
    assert not torch.equal(cast[0], exact)


def far_off(one, other):
    """The share of numbers that differ by more than a last bit or two."""
    pairs = [(one[name].view(-1), other[name].view(-1)) for name in other]
    ours, theirs = (torch.cat(parts) for parts in zip(*pairs))
    return float(((ours - theirs).abs() > 1e-6).float().mean())


def gradients_of(state, ids):
    """Of a slot's loss, before the division, by the names of the model's parameters."""
    parts = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
    near = {
        key: tensor.bfloat16().float().requires_grad_()
        for name, tensor in state.items()
        for key in [name.split(".")[-2]]
        if key != "top"
    }
    jagged, pooled = ids.to_dict(), []
    for key in (*SUMS, "mean"):
        ends = jagged[key].offsets()
        mode = "mean" if key == "mean" else "sum"
        ids_of_key = jagged[key].values()
        sums = embedding_bag(ids_of_key, near[key], ends, mode=mode, include_last_offset=True)
        pooled.append(Cast.apply(sums))
    out = linear(torch.cat(pooled, 1), parts["top.weight"], parts["top.bias"])
    words = near["word"][jagged["word"].values()]
    (out.sin().square().mean() + words.sin().square().mean()).backward()
    return {
        name: parts[name].grad if "top" in name else near[name.split(".")[-2]].grad
        for name in state
    }

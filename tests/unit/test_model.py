"""Dense parts against TorchRec's modules, and the replica's way back to a commit."""

import pytest
import torch

from ecrm.errors import UsageError
from ecrm.model.dlrm import build_dense_parts, resolve_dense_arch
from ecrm.model.replica import FlatDenseReplica
from ecrm.model.slot_batch import SlotBatch, backward, forward

torchrec = pytest.importorskip("torchrec.models.dlrm", reason="torchrec is not installed")


def _inputs(seed: int, batch: int = 32, features: int = 26, dim: int = 16):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, 13, generator=generator),
        torch.randn(50, dim, generator=generator),
        torch.randint(0, 50, (batch * features,), generator=generator),
        (torch.rand(batch, generator=generator) < 0.3).float(),
    )


@pytest.mark.parametrize(("bottom", "top"), [((64, 32, 16), (64, 32, 1)), ((16,), (8, 1))])
def test_native_parts_are_torchrecs_to_rounding(bottom, top):
    ours = build_dense_parts("native", 13, 26, bottom, top, seed=7)
    theirs = build_dense_parts("torchrec", 13, 26, bottom, top, seed=7)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    dense, values, places, _ = _inputs(0)
    first, second = values.clone().requires_grad_(), values.clone().requires_grad_()
    out, expected = ours(dense, first, places), theirs(dense, second, places)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(first.grad, second.grad)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_the_parts_named_torchrec_are_torchrecs_own():
    theirs = build_dense_parts("torchrec", 13, 26, (64, 16), (32, 1), seed=7)
    dense_arch, over_arch = (
        torchrec.DenseArch(13, [64, 16]),
        torchrec.OverArch(16 + 27 * 26 // 2, [32, 1]),
    )
    dense_arch.load_state_dict(theirs.dense_arch.state_dict())
    over_arch.load_state_dict(theirs.over_arch.state_dict())
    dense, values, places, _ = _inputs(0)
    first, second = values.clone().requires_grad_(), values.clone().requires_grad_()
    out = theirs(dense, first, places)
    pooled = second[places].view(32, 26, 16)
    expected = over_arch(torchrec.InteractionArch(26)(dense_arch(dense), pooled)).squeeze(1)
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(first.grad, second.grad)


def test_initial_values_depend_on_the_seed_alone():
    torch.manual_seed(1)
    a = build_dense_parts("native", 13, 4, (8,), (8, 1), seed=3)
    torch.manual_seed(2)
    b = build_dense_parts("native", 13, 4, (8,), (8, 1), seed=3)
    c = build_dense_parts("native", 13, 4, (8,), (8, 1), seed=4)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a.parameters(), c.parameters(), strict=True))


def test_torchrec_asked_for_by_name_is_never_replaced(monkeypatch):
    assert resolve_dense_arch("torchrec") == "torchrec" and resolve_dense_arch("auto") == "native"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_dense_arch("auto") == "native"
    with pytest.raises(UsageError, match="torchrec is not installed"):
        resolve_dense_arch("torchrec")


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_replica_steps_like_torch_and_undoes_to_the_commit(optimizer):
    def replica():
        return FlatDenseReplica(
            build_dense_parts("native", 13, 4, (8,), (8, 1), seed=3), optimizer, 0.05
        )

    plain = build_dense_parts("native", 13, 4, (8,), (8, 1), seed=3)
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    extra = {"eps": 1e-8} if optimizer == "adagrad" else {}
    reference = kinds[optimizer](plain.parameters(), lr=0.05, **extra)
    ours, redo = replica(), replica()
    states = []
    for step in range(4):
        dense, values, places, labels = _inputs(step, features=4, dim=8)
        batch = SlotBatch(dense, labels, torch.arange(50), places)
        reference.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            plain(dense, values, places), labels
        )
        loss.backward()
        reference.step()
        for target in (ours, redo):
            ahead = forward(target, batch, values, 32)
            _, contribution = backward(target, ahead)
            target.apply(contribution)
        if step == 1:
            ours.commit()
            redo.commit()
        states.append([t.clone() for t in ours.state_tensors])
        flat = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
        torch.testing.assert_close(ours.state_tensors[0], flat, rtol=1e-5, atol=1e-6)
    redo.undo()
    redo.undo()
    assert all(torch.equal(a, b) for a, b in zip(redo.state_tensors, states[1], strict=True))
    heir = replica()
    heir.load(redo.export())
    assert all(torch.equal(a, b) for a, b in zip(heir.state_tensors, states[1], strict=True))
    assert float(heir.loss_sum) == float(redo.loss_sum) != 0.0


def test_gradients_of_rows_sum_over_their_uses():
    dense, _, _, labels = _inputs(5, features=4, dim=8)
    ids = torch.randint(0, 10, (32, 4), generator=torch.Generator().manual_seed(1))
    batch = SlotBatch.of(dense, ids, labels, torch.tensor([0, 10, 20, 30]))
    assert torch.equal(batch.rows, (ids + torch.tensor([0, 10, 20, 30])).unique())
    values = torch.randn(batch.rows.numel(), 8, generator=torch.Generator().manual_seed(2))
    replica = FlatDenseReplica(build_dense_parts("native", 13, 4, (8,), (8, 1), seed=3), "sgd", 0.1)
    gradients, _ = backward(replica, forward(replica, batch, values, 32))
    module = replica.module
    leaf = values.clone().requires_grad_()
    rows = torch.cat(
        (module.dense_arch(dense).unsqueeze(1), leaf[batch.places].view(32, 4, 8)), dim=1
    )
    first, second = torch.triu_indices(5, 5, offset=1)
    logits = module.over_arch(
        torch.cat((rows[:, 0], (rows[:, first] * rows[:, second]).sum(2)), dim=1)
    ).squeeze(1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    (expected,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("arch", ["native", "torchrec"])
def test_gradients_of_rows_lie_where_they_are_wanted(arch):
    if arch == "torchrec":
        pytest.importorskip("torchrec")
    dense, _, _, labels = _inputs(5, features=4, dim=8)
    ids = torch.randint(0, 10, (32, 4), generator=torch.Generator().manual_seed(1))
    batch = SlotBatch.of(dense, ids, labels, torch.tensor([0, 10, 20, 30]))
    values = torch.randn(batch.rows.numel(), 8, generator=torch.Generator().manual_seed(2))
    replica = FlatDenseReplica(build_dense_parts(arch, 13, 4, (8,), (8, 1), seed=3), "sgd", 0.1)
    expected, _ = backward(replica, forward(replica, batch, values, 32))
    room = torch.full((len(values) + 3, 8), torch.nan)
    gradients, _ = backward(replica, forward(replica, batch, values, 32, room[: len(values)]))
    assert (
        gradients.data_ptr() == room.data_ptr()
        and torch.equal(gradients, expected)
        and room[len(values) :].isnan().all()
    )


def test_a_new_replica_takes_the_parameters_of_another_alone():
    def make(optimizer: str) -> FlatDenseReplica:
        return FlatDenseReplica(
            build_dense_parts("native", 13, 26, (8, 4), (8, 1), 1), optimizer, 0.1
        )

    other, new = make("adagrad"), make("adam")
    other.apply(torch.ones(other.export()[0].numel() + 1))
    other.commit()
    new.load(other.export()[:1])
    assert torch.equal(new.export()[0], other.export()[0])
    assert not any(tensor.any() for tensor in (*new.export()[1:], *new.present()[1:]))

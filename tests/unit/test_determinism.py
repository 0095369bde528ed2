"""What makes bits differ, and that it is mended."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections import namedtuple

import numpy as np
import pytest
import torch

from ecrm.model.determinism import ALIGNMENT, aligned, prepare_torch, seed_slot


@pytest.fixture
def torch_as_it_was():
    threads, filled = (
        torch.get_num_threads(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def gradients_of_picked_rows(times):
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(60_000, generator=generator) ** 3 * 300).long()
    gradient = torch.randn(len(ids), 16, generator=generator)
    leaf = torch.zeros(300, 16).requires_grad_()
    for _ in range(times):
        leaf.grad = None
        leaf[ids].backward(gradient)
        yield leaf.grad


def test_gradients_of_picked_rows_are_those_of_one_thread(torch_as_it_was):
    torch.set_num_threads(1)
    (expected,) = gradients_of_picked_rows(1)
    prepare_torch(2)
    assert torch.get_num_threads() == 2
    assert all(torch.equal(expected, got) for got in gradients_of_picked_rows(5))
    with pytest.raises(RuntimeError, match="put_"):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


def test_new_memory_is_not_filled(torch_as_it_was):
    prepare_torch(1)
    torch.full((1 << 10,), 7.0)
    assert not all(torch.empty(1 << 10).isnan().all() for _ in range(3))


DRAW = """
import random, sys
import numpy, torch
from ecrm.model.determinism import seed_slot
torch.set_num_threads(int(sys.argv[1]))
seed_slot(3, 10**6, 1)
print(torch.nn.functional.dropout(torch.ones(70_000), 0.5).nonzero().sum().item(),
      torch.randn(9000).sum(dtype=torch.float64).item(), random.random(), numpy.random.rand())
"""


def test_seeds_are_the_same_in_every_process_and_differ_between_slots():
    said = {
        subprocess.run(
            [sys.executable, "-c", DRAW, threads],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads, salt in (("1", "1"), ("2", "2"))
    }
    assert len(said) == 1 and len(said.pop().split()) == 4
    drawn = set()
    for key in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 11, 1), (0, 1, 11), (-1, 0, 0)]:
        seed_slot(*key)
        one = torch.rand(2).tolist(), random.random(), np.random.rand()
        torch.rand(5)
        random.random()
        seed_slot(*key)
        assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == one
        drawn |= {one[0][0], one[1], one[2]}
    assert len(drawn) == 3 * 7


def moved(tensor, by=1):
    """The same tensor, `by` elements past an aligned address."""
    room = torch.zeros(tensor.numel() + by, dtype=tensor.dtype)
    assert room.data_ptr() % ALIGNMENT == 0
    return room[by:].view(tensor.shape).copy_(tensor)


@dataclasses.dataclass(frozen=True)
class Batch:
    dense: torch.Tensor
    more: object


Pair = namedtuple("Pair", "one other")


def test_all_tensors_of_a_batch_are_aligned_and_it_is_left_as_it_was():
    x = moved(torch.arange(12.0).view(3, 4))
    good = torch.ones(3)
    batch = Batch(x, {"a": [x[1:], "words"], "b": Pair(good, (x.long()[0, 1:], None))})
    addresses = [x.data_ptr(), batch.more["a"][0].data_ptr()]
    got = aligned(batch)
    found = [got.dense, got.more["a"][0], got.more["b"].other[0]]
    assert [tensor.data_ptr() % ALIGNMENT for tensor in found] == [0, 0, 0]
    assert torch.equal(got.dense, x) and torch.equal(found[1], x[1:])
    assert found[2].tolist() == [1, 2, 3]
    assert got.more["b"].one is good and type(got.more["b"]) is Pair and type(got) is Batch
    assert got.more["a"][1] == "words"
    assert [batch.dense.data_ptr(), batch.more["a"][0].data_ptr()] == addresses
    assert aligned(got) is got


class Plain:
    """A batch of a class that is no dataclass."""

    def __init__(self, x: object) -> None:
        self.x = x


def test_tensors_in_plain_objects_are_aligned_as_far_as_rows_are_searched_for():
    x = moved(torch.arange(12.0))
    batch = Plain({"of": [Plain(x)]})
    batch.whole, batch.layer = batch, torch.nn.Linear(2, 2)
    got = aligned(batch)
    found = got.x["of"][0].x
    assert found.data_ptr() % ALIGNMENT == 0 and torch.equal(found, x)
    assert batch.x["of"][0].x is x and got.layer is batch.layer
    good = Plain(Plain(torch.ones(3)))
    assert aligned(good) is good


def test_strides_are_kept():
    x = moved(torch.arange(20.0).view(4, 5))
    for view in (x.t(), x[:, 1:3], x[:1, :1].expand(4, 7), x[::2]):
        got = aligned(view)
        assert torch.equal(got, view) and got.stride() == view.stride()
        assert got.data_ptr() % ALIGNMENT == 0
    leaf = x.clone()[0, 1:].detach().requires_grad_()
    assert aligned(leaf).requires_grad and aligned(leaf).is_leaf and aligned(leaf) is not leaf
    computed = (x.requires_grad_() * 2)[:, 1:]
    assert aligned(computed) is computed
    assert aligned(torch.zeros(9)[1:1]).shape == (0,)


def test_a_keyed_jagged_tensor_is_aligned():
    torchrec = pytest.importorskip("torchrec")
    values, lengths = torch.arange(7), torch.tensor([1, 2, 0, 4])
    jagged = torchrec.KeyedJaggedTensor(
        ["a", "b"], moved(values), moved(torch.rand(7), 3), lengths=moved(lengths)
    )
    before = jagged.values().data_ptr()
    got = aligned((jagged, 1))[0]
    assert type(got) is type(jagged) and got.keys() == ["a", "b"]
    for one, other in (
        (got.values(), jagged.values()),
        (got.weights(), jagged.weights()),
        (got.lengths(), jagged.lengths()),
    ):
        assert torch.equal(one, other) and one.data_ptr() % ALIGNMENT == 0
    assert got["b"].values().tolist() == [3, 4, 5, 6]
    assert jagged.values().data_ptr() == before and before % ALIGNMENT


MULTIPLY = """
import torch
from torch.nn.functional import linear
from ecrm.model.determinism import aligned
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
x, weight = torch.randn(256, 64, generator=generator), torch.randn(1, 64, generator=generator)
moved = torch.empty(x.numel() + 1)[1:].view(256, 64).copy_(x)
expected = linear(x, weight)
for one in (moved, aligned(moved)):
    print(torch.equal(linear(one, weight), expected))
"""


def test_a_product_has_the_bits_of_aligned_input():
    """Where MKL has a code path that shows it: that for SSE4.2 does on Intel's processors."""
    ran = subprocess.run(
        [sys.executable, "-c", MULTIPLY],
        env={**os.environ, "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
        capture_output=True,
        text=True,
        check=True,
    )
    as_it_came, aligned_first = ran.stdout.split()
    assert aligned_first == "True"
    if as_it_came == "True":
        pytest.skip("this processor gives the same bits at any address")

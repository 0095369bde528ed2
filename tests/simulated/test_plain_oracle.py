"""The second oracle: rows, optimizers and parity in plain numpy, beside the engine's kernels."""

from __future__ import annotations

import ast
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

import ecrm.protection.routing as routing
import ecrm.storage.initial_rows as initial_rows
from ecrm.placement.initial_values import InitFunction, Uniform, Values
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table
from ecrm.storage.base import NativeStore
from ecrm.testing.simulate import plain_rows, plain_stripes
from ecrm.testing.simulate.oracle import truth_of
from ecrm.testing.simulate.promise import Violation
from ecrm.testing.simulate.workload import Workload
from support.paths import ROOT


def only(**changes) -> SparseOptimizer:
    return SparseOptimizer(**{"name": "adam", "learning_rate": 0.05, **changes})


WORKLOAD = Workload(
    tables=(
        Table("sgd", 40, 8, only(name="sgd", weight_decay=0.02)),
        Table("adagrad", 90, 4, only(name="adagrad"), Uniform(0.1, 0.4)),
        Table("rowwise", 33, 12, only(name="rowwise_adagrad", weight_decay=0.1)),
        Table("adam", 50, 4, only(), InitFunction(torch.nn.init.normal_)),
        Table("adamw", 7, 8, only(weight_decay=0.1, decoupled=True)),
        Table("given", 9, 8, only(name="sgd"), Values(torch.rand(5, 8))),
    ),
    slots=3,
    falls=True,
)


@pytest.mark.parametrize("module", [plain_rows, plain_stripes], ids=lambda it: it.__name__)
def test_the_second_oracle_imports_nothing_of_the_project(module):
    tree = ast.parse((ROOT / module.__file__).read_text())
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [f"{'.' * node.level}{node.module}"]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert "numpy" in names
    assert names <= {"numpy", "collections", "dataclasses", "functools", "__future__"}


def test_both_oracles_have_the_same_records():
    truth = truth_of(WORKLOAD)
    assert len(truth.records) == WORKLOAD.steps + 1
    updated = [(records[:, -1] != 0).sum() for records in truth.records[-1]]
    assert len(updated) == len(WORKLOAD.tables) and min(updated) > 5


def _other_numbers(**changes):
    """A damage: the kernel gets other numbers for the update than those of the optimizer."""

    def damage(monkeypatch):
        right = NativeStore._fused_step

        def step(self, *rest, **more):
            kept, self._optimizer = self._optimizer, replace(self._optimizer, **changes)
            right(self, *rest, **more)
            self._optimizer = kept

        monkeypatch.setattr(NativeStore, "_fused_step", step)

    return damage


def _later_step(monkeypatch):
    right = NativeStore._fused_step
    monkeypatch.setattr(
        NativeStore,
        "_fused_step",
        lambda self, rows, gradients, step, **more: right(self, rows, gradients, step + 1, **more),
    )


def _last_slot_first(monkeypatch):
    """Three gradients of a row are added in the wrong order."""
    right = routing.ShardRequests.update

    def update(self, *rest):
        for asked in self._asked.values():
            asked.places.reverse()
        right(self, *rest)
        for asked in self._asked.values():
            asked.places.reverse()

    monkeypatch.setattr(routing.ShardRequests, "update", update)


def _other_bound(monkeypatch):
    monkeypatch.setattr(initial_rows, "_bound", lambda table: 0.5)


DAMAGES = {
    "an epsilon": _other_numbers(epsilon=1e-6),
    "moments": _other_numbers(betas=(0.9, 0.99)),
    "a decay": _other_numbers(weight_decay=0.021),
    "the step": _later_step,
    "the order of slots": _last_slot_first,
    "first values": _other_bound,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_an_error_below_the_engine_is_seen_by_the_second_oracle_alone(damage, monkeypatch):
    damage(monkeypatch)
    first = truth_of(WORKLOAD, lambda engine: None)  # by the engine alone: nothing is wrong
    assert first.tables
    with pytest.raises(Violation, match="in plain numpy"):
        truth_of(WORKLOAD)


def test_every_product_of_the_field_is_the_product_of_polynomials():
    for a in range(1, 256):
        expected = []
        for b in range(256):
            product = 0
            for bit in range(8):
                product ^= (a << bit) if b >> bit & 1 else 0
            for bit in range(14, 7, -1):
                product ^= (plain_stripes.POLYNOMIAL << bit - 8) if product >> bit & 1 else 0
            expected.append(product)
        assert plain_stripes._multiples(a).tolist() == expected


def test_sixteen_bits_are_those_of_torch():
    numbers = np.random.default_rng(5).integers(0, 2**32, 4000, np.uint64).astype(np.uint32)
    tied = np.arange(0x3F7F8000, 0x3F838000, 0x4000, np.uint32)
    values = np.concatenate([numbers, tied]).view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values.copy()).bfloat16().float().numpy()
    assert plain_rows.bfloat16(values).tobytes() == expected.tobytes()


def test_a_fused_sum_is_rounded_once():
    """Sums exactly between two float32 numbers, but for an error far below, are among these."""
    draws = np.random.default_rng(5)
    tied = np.float32(1 + 2**-12) * np.ones(200, np.float32)
    a = np.concatenate([draws.standard_normal(200, np.float32), tied])
    b = np.concatenate([draws.standard_normal(200, np.float32), tied])
    tiny = draws.choice(np.array([1, -1], np.float32) * np.float32(2**-60), 200)
    c = np.concatenate([draws.standard_normal(200, np.float32), tiny])
    found = plain_rows._fused(a, b, c)
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (found[200:] != twice[200:]).any()
    for one, other, more, sum_ in zip(*(x.tolist() for x in (a, b, c, found)), strict=True):
        exact = Fraction(one) * Fraction(other) + Fraction(more)
        below = Fraction(float(np.nextafter(np.float32(sum_), np.float32(-np.inf))))
        above = Fraction(float(np.nextafter(np.float32(sum_), np.float32(np.inf))))
        assert abs(exact - Fraction(sum_)) < min(abs(exact - below), abs(exact - above))

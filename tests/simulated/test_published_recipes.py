"""The models with published numbers of `examples/` on simulated ranks: kills change no bit."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault
from support.examples import EXAMPLES
from support.sessions import Layout, run

STEPS, TABLES = 4, 26
KILLS = [PhaseFault(1, 1, "parity"), PhaseFault(4, 2, "update")]
"""A server, and the main trainer."""


@pytest.fixture
def example(monkeypatch):
    """Imports a module of `examples/` that only has definitions."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def bars_parts(bars, name):
    """A model of BARS over small tables, its rows, and batches with a loss each."""
    data = SimpleNamespace(tables=[(f"t_{number}", 30 + number) for number in range(TABLES)])
    rows = torch.tensor([count for _, count in data.tables])

    def batch(step, slot):
        random = torch.Generator().manual_seed(10 * step + slot)
        ids = (torch.rand(8, TABLES, generator=random) * rows).long()
        labels = torch.randint(2, (8,), generator=random).float()
        return bars.batch_of(data, (torch.randn(8, bars.DENSE, generator=random), ids, labels))

    def loss_of(model, found):
        dense, ids, labels = found
        return F.binary_cross_entropy_with_logits(model(dense, ids), labels)

    model = bars.MODELS[name](bars.bags_of(data, "meta"))
    return model, model.bags, batch, loss_of


def reference_parts(references, name):
    """A narrow reference over small tables, its rows, and batches with a loss each."""
    data = SimpleNamespace(tables=[(f"t_{number}", 30 + number) for number in range(TABLES)])
    rows = torch.tensor([count for _, count in data.tables])

    def batch(step, slot):
        random = torch.Generator().manual_seed(10 * step + slot)
        ids = (torch.rand(8, TABLES, generator=random) * rows).long()
        labels = torch.randint(2, (8,), generator=random).float()
        dense = torch.randn(8, references.DENSE, generator=random)
        return references.batch_of(name, data, (dense, ids, labels))

    def loss_of(model, found):
        dense, ids, labels = found
        return F.binary_cross_entropy_with_logits(model(dense, ids).squeeze(1), labels)

    model = references.model_of(name, data, 16, "meta")
    return model, model.sparse_arch, batch, loss_of


def hstu_parts(hstu):
    """The sequence model, its rows, and batches of histories with a loss each."""

    def batch(step, slot):
        random = np.random.default_rng(10 * step + slot)
        return hstu.collate([random.integers(0, hstu.MOVIES, size) for size in (3, 9, 5)])

    model = hstu.Hstu("meta")
    return model, model.rows, batch, lambda model, found: hstu.loss_of(model(found[0]), found[1])


MODELS = {
    "dlrm": ("bars", bars_parts),
    "dcnv2": ("bars", bars_parts),
    "hstu": ("hstu", lambda module, _: hstu_parts(module)),
    "kaggle": ("references", reference_parts),
    "mlperf": ("references", reference_parts),
}
"""The module of `examples/` and the parts of a model."""


@pytest.mark.parametrize("name", MODELS)
def test_two_kills_change_no_bit_of_a_model(name, example):
    module, parts = example(MODELS[name][0]), MODELS[name][1]

    def train(start):
        torch.manual_seed(0)
        model, tables, batch, loss_of = parts(module, name)
        if parts is reference_parts:
            reference = module.REFERENCES[name]
            optimizer, rates = reference.optimizer, {"lr": reference.rate}
            numbers = rates
        else:
            optimizer, rates = torch.optim.Adam, {"lr": module.RATE}
            numbers = {**rates, "betas": module.BETAS, "weight_decay": 1e-5}
        apply_optimizer_in_backward(optimizer, tables.parameters(), numbers)
        session = Session(
            model,
            slots=2,
            dense_optimizer=lambda parameters: optimizer(parameters, **rates),
            start=start,
        )
        logged = {}
        session.on_commit(logged.__setitem__)
        for found in session.steps(batch, STEPS):
            loss = loss_of(session.model, found)
            loss.backward()
            session.log(loss=loss)
        session.delivered = list(logged.items())
        return session

    calm, killed = (run(faults, Layout(spares=2), train) for faults in ((), KILLS))
    assert calm.deaths == calm.mismatches == killed.mismatches == 0 and killed.deaths == 2
    assert (killed.tables, killed.dense) == (calm.tables, calm.dense)
    assert len(calm.logged) == STEPS and killed.logged == calm.logged[-len(killed.logged) :]

"""Evaluation: the same numbers whichever ranks run the slots, in memory that does not grow.

The numbers are compared with exact ones.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ecrm.metrics import auc, logit_losses
from ecrm.placement.tables import Table, row_spaces
from ecrm.train.evaluate import Evaluation, evaluate

BATCH = 96
SLOTS = 3


class Rows:
    """A held-out split with a made-up signal; `logits` are the model's output for each sample."""

    def __init__(self, size: int) -> None:
        random = np.random.default_rng(2)
        self.eval_rows = size
        self.logits = random.normal(-1, 1, size).astype(np.float32)
        self.labels = (random.random(size) < 1 / (1 + np.exp(-self.logits))).astype(np.float32)

    def eval_batch(self, start: int, size: int):
        part = slice(start, start + size)
        dense = torch.from_numpy(self.logits[part].copy()).unsqueeze(1)
        return (
            dense,
            torch.zeros(size, 1, dtype=torch.int64),
            torch.from_numpy(self.labels[part].copy()),
        )


class Model(torch.nn.Module):
    """Its logits are the samples' only dense feature."""

    def forward(
        self, dense: torch.Tensor, values: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        return dense[:, 0]


def score(rows: Rows, hosts: tuple[int, ...]) -> Evaluation:
    """Evaluate with slot i on rank `hosts[i]`, one rank after the other.

    Rank 0 is the reporter and comes last.
    """
    sent: dict[int, list[torch.Tensor]] = {}
    said: dict[int, object] = {}

    def on(rank: int) -> Evaluation:
        def exchange(outgoing):
            sent.update({rank: tensors for tensors in outgoing.values()})
            return dict(sorted(sent.items()))

        def gather(value, doing):
            said[rank] = json.loads(json.dumps(value))
            return dict(sorted(said.items()))

        engine = SimpleNamespace(
            rank=rank,
            view=SimpleNamespace(slots=hosts, reporter=0),
            slots=[slot for slot, host in enumerate(hosts) if host == rank],
            enter=lambda phase: None,
            lookup=lambda wanted: {
                slot: [torch.zeros(r[0].numel(), 4)] for slot, r in wanted.items()
            },
            state=SimpleNamespace(
                dense=SimpleNamespace(
                    module=Model(),
                    device=torch.device("cpu"),
                    loss_sum=torch.tensor([12.5], dtype=torch.float64),
                ),
                spaces=row_spaces([Table("t", 1, 4)]),
                transport=SimpleNamespace(exchange=exchange, gather=gather),
            ),
            recovery=SimpleNamespace(recovering=nullcontext),
            heed_stop=lambda: None,
        )
        return evaluate(engine, rows, torch.zeros(1, dtype=torch.int64), BATCH)

    for rank in (2, 1):
        with pytest.raises(KeyError):  # the reporter has not spoken yet
            on(rank)
    return on(0)


def test_the_numbers_are_near_the_exact_ones_and_do_not_depend_on_who_runs_the_slots():
    rows = Rows(2000)
    found = score(rows, (0, 1, 2))
    for hosts in ((0, 0, 0), (1, 1, 2), (2, 0, 1)):
        assert score(rows, hosts) == found
    assert found.samples == 2000
    assert abs(found.auc - auc(rows.labels, rows.logits)) <= found.auc_error < 1e-3
    assert found.log_loss == pytest.approx(logit_losses(rows.labels, rows.logits).mean(), rel=1e-12)


def test_a_split_of_fewer_samples_than_slots_and_one_of_none():
    rows = Rows(1)
    assert score(rows, (0, 1, 2)).log_loss == pytest.approx(
        logit_losses(rows.labels, rows.logits)[0]
    )
    assert score(Rows(0), (0, 1, 2)) == Evaluation(0, None, None, None, 12.5)


def test_one_logit_that_is_not_finite_leaves_no_number_and_is_told_with_its_slot():
    rows = Rows(500)
    rows.logits[123] = np.nan
    found = score(rows, (0, 1, 2))
    assert found == Evaluation(500, None, None, None, 12.5, found.not_finite)
    assert found.not_finite[0] == 0 and found.not_finite[1].startswith("in the output of layer")


def test_what_is_sent_is_bounded_however_many_samples_there_are():
    """With ten times the samples, the reporter still gets one bin per distinct score."""
    import ecrm.train.evaluate as module

    rows = Rows(20_000)
    rows.logits = np.round(rows.logits * 8) / 8
    sizes = []
    for part in (2000, 20_000):
        scores = module._Scores()
        scores.add(0, torch.from_numpy(rows.labels[:part]), torch.from_numpy(rows.logits[:part]))
        sizes.append(sum(tensor.nbytes for tensor in scores.message()))
    assert sizes[1] < 2 * sizes[0] < 20_000

"""The recipe of a config: the same bits alone and on ranks that die, for every optimizer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from ecrm.base.errors import NotFinite
from ecrm.config import load_config
from ecrm.data.metrics import auc
from ecrm.engine.table_digest import gather_rows, table_digests, table_sums
from ecrm.kernels.row_digest import row_digest
from ecrm.model.determinism import prepared_torch
from ecrm.recipes import models
from ecrm.recipes import train as recipe
from ecrm.run.lone_run import run_alone
from ecrm.run.summary import flat_state
from ecrm.storage.base import Store
from ecrm.testing.simulated_transport import PhaseFault
from support.training import train

TINY = ("train.steps=6", "train.eval_every_steps=4")
TRAINER = 3


def alone(data: Path, *sets: str) -> tuple[str, str, dict[str, str]]:
    """Digests of the tables and of the dense part, and sums, after a run without ranks."""
    config = load_config("tiny", [f"data.path={data}", *TINY, *sets])
    with prepared_torch(threads=1):
        session = recipe.train(config, start=run_alone)
    digest = hashlib.sha256()
    for tensor in flat_state(session._replica):
        digest.update(tensor.contiguous().numpy().data)
    found = table_digests(session._engine, 0)
    assert len(found) == 26
    return "".join(found.values()), digest.hexdigest(), table_sums(session._engine, 0)


@pytest.mark.parametrize("arch", ["native", pytest.param("torchrec", marks=pytest.mark.drill)])
@pytest.mark.parametrize(
    ("rows", "dense"),
    [("rowwise_adagrad", "adagrad"), ("sgd", "sgd"), ("adagrad", "sgd"), ("adam", "adam")],
)
def test_ranks_that_die_come_to_the_bits_of_a_run_alone(tmp_path, criteo_rows, rows, dense, arch):
    sets = [f"train.sparse_optimizer={rows}", f"train.dense_optimizer={dense}"]
    sets += [f"model.dense_arch={arch}"]
    tables, digest, sums = alone(criteo_rows, *sets)
    faults = [PhaseFault(TRAINER, 3, "backward")]
    run = train(tmp_path / "run", criteo_rows, *TINY, *sets, faults=faults)
    assert run.killed == [TRAINER]
    assert "".join(run.summary["tables"].values()) == tables
    assert run.summary["dense_sha256"] == digest
    assert run.summary["table_sums"] == sums and len(set(sums.values())) == 26


def test_sums_of_tables_are_sums_over_all_rows(criteo_rows):
    config = load_config("tiny", [f"data.path={criteo_rows}", *TINY])
    with prepared_torch(threads=1):
        engine = recipe.train(config, start=run_alone)._engine
    sums = table_sums(engine, 0)
    for space, row_space in enumerate(engine.state.spaces):
        for table, offset in zip(row_space.tables, row_space.offsets, strict=True):
            rows = torch.arange(offset, offset + table.rows)
            parts = [
                row_digest(gather_rows(engine, space, rows, part, 0), rows - offset).numpy()
                for part in (Store.lookup, Store.lookup_state)
            ]
            assert sums[table.name] == b"".join(part.tobytes() for part in parts).hex()


def test_both_interactions_are_the_same_to_rounding(criteo_rows):
    models, losses = [], []
    for arch in ("native", "torchrec"):
        config = load_config(
            "tiny", [f"data.path={criteo_rows}", *TINY, f"model.dense_arch={arch}"]
        )
        with prepared_torch(threads=1):
            session = recipe.train(config, start=run_alone)
        models.append(session.model)
        losses.append([p.detach() for p in session.model.parameters() if not p.is_meta])
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)
    assert models[0].interaction is not None and models[1].interaction is None


def test_an_evaluation_has_the_numbers_of_all_held_out_rows(tmp_path, criteo_rows, monkeypatch):
    seen = []
    monkeypatch.setattr(recipe, "auc", lambda *given: seen.append(given) or auc(*given))
    run = train(tmp_path / "run", criteo_rows, *TINY)
    told = run.of("evaluation")
    assert [event["step"] for event in told] == [4, 6]
    labels, scores = seen[-1]
    assert told[-1]["values"]["auc"] == auc(labels, scores)
    assert told[-1]["values"]["samples"] == len(labels) > 100
    assert {
        name.removeprefix("eval_"): value
        for name, value in run.summary.items()
        if name.startswith("eval_")
    } == told[-1]["values"]


def test_without_evaluations_in_between_the_end_is_evaluated(tmp_path, criteo_rows):
    run = train(tmp_path / "run", criteo_rows, "train.steps=3", "train.eval_every_steps=0")
    assert [event["step"] for event in run.of("evaluation")] == [3]
    none = train(tmp_path / "none", criteo_rows, "train.steps=3", "data.eval_fraction=0")
    assert not none.of("evaluation") and "eval_auc" not in none.summary


@pytest.mark.parametrize("on_nonfinite", ["stop", "warn"])
def test_a_logit_that_is_not_finite_ends_the_run_or_leaves_no_number(
    tmp_path, criteo_rows, monkeypatch, on_nonfinite
):
    forward = models.Dlrm.forward

    def spoiled(self, dense, ids):
        logits = forward(self, dense, ids)
        return logits if self.training else logits * float("inf")

    monkeypatch.setattr(models.Dlrm, "forward", spoiled)
    sets = (*TINY, f"train.on_nonfinite={on_nonfinite}")
    if on_nonfinite == "stop":
        with pytest.raises(NotFinite, match="the evaluation at step 4 is not finite; lower train"):
            alone(criteo_rows, *sets)
        return
    (at_4, at_6) = train(tmp_path / "run", criteo_rows, *sets).of("evaluation")
    assert at_4["values"]["logloss"] is at_6["values"]["auc"] is None

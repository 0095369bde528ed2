"""The recipe of DLRM comes to the built-in trainer's bits, for every optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ecrm.config import load_config
from ecrm.data.dataset import CriteoDataset
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.engine.step_input import StepInput
from ecrm.engine.table_digest import table_digests
from ecrm.model.determinism import prepared_torch
from ecrm.model.slot_batch import backward, forward
from ecrm.placement.assignment import initial_view
from ecrm.protection.none import NoProtection
from ecrm.recipes.dlrm import train
from ecrm.run.lone_run import run_alone
from ecrm.train.build_engine import build_engine, dense_of
from ecrm.train.trainer import CriteoBatches
from ecrm.transport.alone import LoneTransport
from support.commands import ecrm as command

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset of 500 rows."""
    made = tmp_path_factory.mktemp("rows")
    text, folder = made / "rows.txt", made / "data"
    command("generate", "criteo", "--rows", "500", "--seed", "1", "--output", str(text), check=True)
    command("prepare", "criteo", str(text), "--output", str(folder), check=True)
    return folder


def trained(config: Any, data: CriteoDataset) -> Engine:
    """The built-in trainer's engine after STEPS steps."""
    protection = NoProtection(shards=1)
    view = initial_view("colocated", protection.shape, 1, 0, config.slots, 1)
    engine = build_engine(config, LoneTransport(), protection, view, data, Hooks())
    size = config.train.global_batch
    batches = CriteoBatches(engine, data, size, 0)
    for step in range(STEPS):
        mine = {slot: batches.batch(step, slot) for slot in engine.slots}
        values = engine.lookup({slot: [b.rows] for slot, b in mine.items()}, apply_follows=True)
        done = {
            slot: backward(dense_of(engine), forward(dense_of(engine), b, values[slot][0], size))
            for slot, b in mine.items()
        }
        engine.apply(
            StepInput(
                {slot: [gradients] for slot, (gradients, _) in done.items()},
                {slot: contribution for slot, (_, contribution) in done.items()},
                commit=True,
            )
        )
    return engine


@pytest.mark.parametrize(
    "slots, rows, dense",
    [
        (2, "rowwise_adagrad", "adagrad"),
        (3, "rowwise_adagrad", "sgd"),
        pytest.param(2, "sgd", "adam", marks=pytest.mark.drill),
        pytest.param(4, "adagrad", "sgd", marks=pytest.mark.drill),
        (5, "adam", "adam"),
    ],
)
def test_the_recipe_comes_to_the_trainers_bits(folder, slots, rows, dense, capsys):
    given = [f"data.path={folder}", f"train.steps={STEPS}", "train.epochs=0"]
    given += [f"train.slots={slots}", f"train.global_batch={48 * slots}"]
    given += [f"train.sparse_optimizer={rows}", f"train.dense_optimizer={dense}"]
    given += ["train.eval_every_steps=2"]
    config = load_config("quickstart", given)
    data = CriteoDataset.open(
        folder, config.model.max_rows_per_table or None, config.data.eval_fraction
    )
    with prepared_torch(threads=1):
        trainer, session = trained(config, data), train(config, start=run_alone)
    found = {name.split(".")[-1]: d for name, d in table_digests(session._engine, 0).items()}
    assert found == table_digests(trainer, 0) and len(found) == 26
    ours = [p for p in session.model.parameters() if not p.is_meta]
    theirs = list(dense_of(trainer).module.parameters())
    assert len(ours) == len(theirs) == 12
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    said = capsys.readouterr().out
    assert "step 2: AUC 0." in said and "step 3: AUC 0." in said

"""The models of a config on a prepared table: the same bits alone and on ranks that die."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM, DLRM_DCN

from ecrm.checkpoint.exported_model import TABLE
from ecrm.config import load_config
from ecrm.data.metrics import auc
from ecrm.engine.table_digest import table_digests
from ecrm.launch.dense_size import dense_parameters
from ecrm.model.determinism import prepared_torch
from ecrm.recipes import train as recipe
from ecrm.recipes.models import MODELS
from ecrm.recipes.rows import open_rows
from ecrm.run.lone_run import run_alone
from ecrm.run.summary import flat_state
from ecrm.testing.simulated_transport import PhaseFault
from support.columns import prepared_small
from support.training import train

SETS = ("train.steps=8", "train.eval_every_steps=4", "model.max_rows_per_table=0")
TOWERS = ("model.architecture=two_tower", 'model.user_columns=["movie","price"]')
MODELS_BY_SETS = {
    "dlrm": (),
    "dcnv2": ("model.architecture=dcnv2",),
    "two_tower": TOWERS,
}
TRAINER = 3
HEADER = "clicked,price,movie,genres,tags,note\n"
TIMED = """[columns]
clicked = { kind = "label" }
price = { kind = "time" }
movie = { kind = "categorical", rows = 50, table = "items" }
genres = { kind = "multi_hot", rows = 50, table = "items", separator = "|" }
tags = { kind = "multi_hot", vocabulary = true, separator = "|" }
note = { kind = "unused" }
"""


def made(folder: Path, count: int = 400, **options) -> Path:
    """A prepared table whose label is decided by the movie."""
    random = np.random.default_rng(0)
    lines = [
        f"{int(movie % 3 == 0)},{price:.2f},m{movie},g{movie % 5}|g{price:.0f},t{movie % 7}:0.5,x\n"
        for movie, price in zip(random.integers(40, size=count), random.uniform(0, 9, count))
    ]
    return prepared_small(folder, HEADER + "".join(lines), **options)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return made(tmp_path_factory.mktemp("table"))


def alone(data: Path, *sets: str):
    config = load_config("tiny", [f"data.path={data}", *SETS, *sets])
    with prepared_torch(threads=1):
        return recipe.train(config, start=run_alone)


@pytest.mark.parametrize("name", list(MODELS_BY_SETS))
def test_a_table_trains_to_the_same_bits_alone_and_on_ranks_that_die(tmp_path, data, name):
    sets = MODELS_BY_SETS[name]
    session = alone(data, *sets)
    digest = hashlib.sha256()
    for tensor in flat_state(session._replica):
        digest.update(tensor.contiguous().numpy().data)
    faults = [PhaseFault(TRAINER, 3, "backward"), PhaseFault(1, 5, "update")]
    run = train(tmp_path / "run", data, *SETS, *sets, faults=faults)
    assert sorted(run.killed) == [1, TRAINER]
    assert run.summary["tables"] == table_digests(session._engine, 0)
    names = [
        TABLE.format(name).removesuffix(".weight") for name in ("t_movie", "t_genres", "t_tags")
    ]
    assert list(run.summary["tables"]) == names
    assert run.summary["dense_sha256"] == digest.hexdigest()


@pytest.mark.parametrize("name", list(MODELS_BY_SETS))
def test_a_model_learns_from_a_table(tmp_path, data, name):
    sets = (*SETS, *MODELS_BY_SETS[name], "train.steps=60", "train.epochs=0", "train.sparse_lr=0.2")
    run = train(tmp_path / "run", data, *sets)
    assert run.summary["eval_auc"] > 0.9 and run.summary["eval_samples"] == 100


@pytest.mark.parametrize("name", list(MODELS_BY_SETS))
def test_the_number_of_dense_parameters_is_known_before_the_start(data, name):
    config = load_config("tiny", [f"data.path={data}", *MODELS_BY_SETS[name]])
    rows = open_rows(config)
    model = MODELS[name](config, rows)
    found = sum(p.numel() for p in model.parameters() if not p.is_meta)
    assert dense_parameters(config.model, rows.about) == found


@pytest.mark.parametrize("name", ["dlrm", "dcnv2"])
def test_torchrec_loads_the_saved_model_and_comes_to_the_same_scores(
    tmp_path, data, monkeypatch, name
):
    """A weighted feature counts by its weights, and several ids of a feature are summed."""
    seen = []
    monkeypatch.setattr(recipe, "auc", lambda *given: seen.append(given) or auc(*given))
    sets = (*MODELS_BY_SETS[name], "model.dense_arch=torchrec")
    alone(data, *sets).save(tmp_path / "model.pt")
    rows = open_rows(load_config("tiny", [f"data.path={data}", *SETS, *sets]))
    bags = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"t_{feature}", num_embeddings=count, embedding_dim=8, feature_names=[feature]
            )
            for feature, count in (("movie", 50), ("genres", 11), ("tags", 20))
        ],
        is_weighted=True,
    )
    plain = {
        "dlrm": lambda: DLRM(bags, 1, [16, 8], [16, 1]),
        "dcnv2": lambda: DLRM_DCN(bags, 1, [16, 8], [16, 1], 3, 32),
    }[name]()
    plain.load_state_dict(torch.load(tmp_path / "model.pt"), strict=True)
    dense, ids, _ = rows.held_out.batch(0, 0, 1)
    with torch.no_grad():
        scores = plain(dense, ids).squeeze(1)
    torch.testing.assert_close(torch.from_numpy(seen[-1][1])[: len(scores)], scores)


def test_a_table_without_time_is_shuffled_anew_in_every_pass(tmp_path, data):
    rows = open_rows(load_config("tiny", [f"data.path={data}", *SETS]))
    every = [rows.batch_of(step, slot) for step in range(10) for slot in range(2)]
    sums = [float(dense.sum()) for dense, _, _ in every]
    whole = torch.cat([dense for dense, _, _ in every])[:600, 0]
    first, second = whole[:300], whole[300:]
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values) and len(set(sums)) > 10


def test_rows_of_a_table_with_a_time_come_in_its_order(tmp_path):
    rows = open_rows(load_config("tiny", [f"data.path={made(tmp_path, schema=TIMED)}", *SETS]))
    assert rows.inputs == 1 and not rows.dense
    batches = [rows.batch_of(0, slot) for slot in range(2)]
    assert all(torch.equal(dense, torch.ones(32, 1)) for dense, _, _ in batches)
    again = open_rows(load_config("tiny", [f"data.path={tmp_path / 'out'}", "train.seed=9"]))
    assert torch.equal(batches[1][1].values(), again.batch_of(0, 1)[1].values())
    assert rows.tables == {"t_items": 50, "t_tags": 8}
    alone(tmp_path / "out")


def test_a_cap_folds_the_ids_of_a_table(tmp_path, data):
    free, few = (
        open_rows(load_config("tiny", [f"data.path={data}", f"model.max_rows_per_table={cap}"]))
        for cap in (0, 10)
    )
    assert few.tables == {"t_movie": 10, "t_genres": 10, "t_tags": 10}
    ids, folded = (rows.batch_of(0, 0)[1].values() for rows in (free, few))
    assert int(ids.max()) > 9 and torch.equal(folded, torch.where(ids > 0, 1 + (ids - 1) % 9, 0))


def test_an_evaluation_has_the_held_out_rows_of_the_table(tmp_path, data, monkeypatch):
    seen = []
    monkeypatch.setattr(recipe, "auc", lambda *given: seen.append(given) or auc(*given))
    run = train(tmp_path / "run", data, *SETS, "checkpoint.keep_best=auc")
    labels, _ = seen[-1]
    assert labels.tolist() == np.fromfile(data / "labels.bin", "<f4")[300:].astype(bool).tolist()
    assert [event["step"] for event in run.of("evaluation")] == [4, 8]

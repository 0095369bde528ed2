"""Checkpoints of real runs: all processes are killed at a random instant, others go on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ecrm.checkpoint.folder import Checkpoint, name_of
from ecrm.cli.commands import main
from support.datasets import prepared
from support.drilling import (
    BASE,
    CHECKPOINTS,
    Run,
    kill_everything_once,
    launch,
    resume,
)


def there(folder: Path, steps: int) -> Callable[[], bool]:
    """Whether the checkpoint of so many steps is there."""
    return (folder / "checkpoints" / name_of(steps) / "manifest.json").exists


LONG = {"train.steps": 200, "train.global_batch": 64}


def test_all_killed_at_random_instants_and_finished_on_other_clusters(tmp_path, criteo_rows):
    """Two clusters with other protections go on from what a run left that was killed as a whole."""
    expected = launch(tmp_path / "undisturbed", criteo_rows, {**BASE, **LONG})
    draw = random.Random()
    wait = draw.uniform(0, 0.5)
    print(f"killed {wait} s after step 40")
    written = {
        "checkpoint.every_steps": 20,
        "checkpoint.mode": "async",
        "checkpoint.kind": "incremental",
    }
    killed = tmp_path / "killed"
    kill_everything_once(there(killed, 40), wait, killed, criteo_rows, {**BASE, **LONG, **written})
    for number, shape in enumerate(
        (
            {"cluster.servers": 5, "protection.m": 2, "cluster.spares": 0, **written},
            {
                "protection.name": "checkpoint",
                "cluster.servers": 2,
                "cluster.layout": "colocated",
                "protection.verify_parity_at_end": False,
                **written,
            },
        )
    ):
        run = resume(
            tmp_path / f"run{number}",
            criteo_rows,
            tmp_path / "killed",
            {**BASE, **LONG, **shape},
        )
        assert run.code == 0, run.output
        assert run.model == expected.model, run.output
        assert 40 <= run.summary["resumed"]["step"] < 200


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory, criteo_rows: Path) -> Path:
    """The folder of a run of `CHECKPOINTS` of which every rank has died in step 13."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    run = launch(folder, criteo_rows, CHECKPOINTS, tuple(f"{rank}@13:update" for rank in range(6)))
    assert run.code != 0 and not (folder / "summary.json").exists(), run.output
    assert Checkpoint.open(folder / "checkpoints" / name_of(12)).step == 12
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, criteo_rows: Path, killed_run: Path) -> Run:
    """The run that another cluster with another protection has gone on with."""
    other = {
        **BASE,
        "cluster.servers": 2,
        "cluster.trainers": 1,
        "cluster.spares": 0,
        "protection.name": "none",
    }
    other |= {"protection.verify_parity_at_end": False, "checkpoint.every_steps": 100}
    run = resume(tmp_path_factory.mktemp("finished") / "run", criteo_rows, killed_run, other)
    assert run.code == 0, run.output
    return run


def test_a_run_killed_as_a_whole_goes_on_elsewhere(finished, undisturbed):
    assert finished.model == undisturbed
    assert finished.summary["resumed"]["step"] == 12 and "from step 12" in finished.output


def test_what_is_exported_is_evaluated_the_same_by_torchrecs_own_dlrm(
    tmp_path, criteo_rows, finished
):
    """Both formats, loaded strictly; the AUC over the held-out rows is the run's."""
    pytest.importorskip("torchrec")
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.models.dlrm import DLRM

    from ecrm.checkpoint.model_file import read_safetensors
    from ecrm.config import load_config
    from ecrm.data.dataset import CriteoDataset
    from ecrm.data.metrics import auc

    for form in ("safetensors", "torchrec"):
        assert (
            main(
                ["export", str(finished.folder), "--format", form, "--output", str(tmp_path / form)]
            )
            == 0
        )
    state = torch.load(tmp_path / "torchrec", weights_only=True)
    plain = {
        name: torch.from_numpy(array)
        for name, array in read_safetensors(tmp_path / "safetensors").items()
    }
    assert state.keys() == plain.keys() and all(
        torch.equal(state[name], plain[name]) for name in state
    )
    model = load_config("tiny", [f"data.path={criteo_rows}"]).model
    dataset = CriteoDataset.open(criteo_rows, model.max_rows_per_table, 0.1)
    names = [name for name, _ in dataset.tables]
    bags = [
        EmbeddingBagConfig(
            name=n, embedding_dim=model.embedding_dim, num_embeddings=r, feature_names=[n]
        )
        for n, r in dataset.tables
    ]
    dlrm = DLRM(EmbeddingBagCollection(bags), 13, list(model.bottom_mlp), list(model.top_mlp))
    dlrm.load_state_dict(state, strict=True)
    dense, ids, labels = dataset.eval_batch(0, dataset.eval_rows)
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=names, values=ids.t().reshape(-1), lengths=torch.ones(ids.numel(), dtype=torch.int64)
    )
    with torch.no_grad():
        scores = dlrm(dense, features).squeeze(1)
    assert abs(auc(labels.numpy(), scores.numpy()) - finished.summary["eval_auc"]) < 1e-5
    # is there already
    assert main(["export", str(finished.folder), "--output", str(tmp_path / "torchrec")]) == 2


@pytest.fixture(scope="module")
def next_day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other rows for the same tables."""
    return prepared(tmp_path_factory.mktemp("next_day"), rows=6_000, seed=2)


def test_the_next_day_at_another_rate_ends_the_same_with_and_without_kills(
    tmp_path, criteo_rows, next_day, killed_run
):
    """More ranks die than protection covers, before and after the first checkpoint of the run."""
    sets = {
        **BASE,
        "train.sparse_lr": 0.02,
        "train.dense_lr": 0.02,
        "train.steps": 30,
        "checkpoint.every_steps": 12,
    }
    calm = resume(tmp_path / "calm", next_day, killed_run, sets)
    assert calm.code == 0, calm.output
    assert calm.summary["resumed"]["data_began"] == 12
    for line in (
        "train.sparse_lr 0.05 -> 0.02",
        "train.dense_lr 0.01 -> 0.02",
        "12,000 -> 6,000 rows, from the first of them",
    ):
        assert calm.output.count(line) == 1, calm.output
    kills = ("0@15:parity", "1@15:parity", "2@27:parity", "3@27:parity")
    run = resume(
        tmp_path / "disturbed",
        next_day,
        killed_run,
        {**sets, "cluster.spares": 3, "cluster.servers": 4},
        kills,
    )
    assert run.code == 0, run.output
    assert [event["step"] for event in run.events_of("rolled_back")] == [12, 24], run.output
    assert run.model == calm.model


def test_a_run_begins_with_another_s_weights_and_kills_change_nothing(
    tmp_path, next_day, killed_run
):
    """Continues with other optimizers, seed, data and cluster.

    More ranks die than the protection covers, before and after the first checkpoint.
    """
    sets = {
        **BASE,
        "train.steps": 30,
        "train.seed": 9,
        "train.sparse_optimizer": "adagrad",
        "train.dense_optimizer": "adam",
        "checkpoint.every_steps": 12,
        "train.eval_every_steps": 1,
    }
    calm = resume(tmp_path / "calm", next_day, killed_run, sets, how="--init-from")
    assert calm.code == 0 and "with the weights of" in calm.output, calm.output
    new = launch(tmp_path / "new", next_day, sets)
    losses = [run.events_of("evaluation")[0]["values"]["logloss"] for run in (calm, new)]
    assert losses[0] < losses[1], "after one step it is better than a run that begins with nothing"
    kills = ("0@5:parity", "1@5:parity", "2@27:parity", "3@27:parity")
    run = resume(
        tmp_path / "disturbed",
        next_day,
        killed_run,
        {**sets, "cluster.spares": 3, "cluster.servers": 4},
        kills,
        "--init-from",
    )
    assert run.code == 0, run.output
    assert [event["step"] for event in run.events_of("rolled_back")] == [0, 24], run.output
    assert run.model == calm.model != new.model


def test_a_run_ends_early_at_the_same_step_with_kills_and_gone_on_with(tmp_path, criteo_rows):
    """Best evaluation, its checkpoint and early stopping are the same, whichever ranks die.

    They are also the same after --resume.
    """
    early = {
        **BASE,
        "train.eval_every_steps": 4,
        "train.stop_after_evaluations_without_gain": 2,
        "train.log_every_steps": 4,
    }
    early |= {
        "checkpoint.keep_best": "auc",
        "checkpoint.every_steps": 3,
        "checkpoint.keep": 1,
        "train.sparse_lr": 5.0,
    }
    calm = launch(tmp_path / "calm", criteo_rows, early)
    assert calm.code == 0, calm.output
    ended = calm.summary["ended_early"]
    assert calm.summary["completed"] and ended["step"] == calm.summary["steps"] < 40, calm.output
    assert f"training ends at step {ended['step']} of 40" in calm.output
    at = ended["best_step"]
    best = calm.folder / "checkpoints" / "best"
    assert Checkpoint.open(best.resolve()).step == at
    assert main(["export", str(best), "--output", str(tmp_path / "best.safetensors")]) == 0
    first = launch(
        tmp_path / "first", criteo_rows, {**early, "train.steps": at + 1}, kills=(f"1@{at}:update",)
    )
    assert first.code == 0, first.output
    second = resume(
        tmp_path / "second", criteo_rows, tmp_path / "first", {**early, "cluster.servers": 5}
    )
    assert second.code == 0, second.output
    assert (second.model, second.summary["ended_early"]) == (calm.model, ended), second.output
    assert Checkpoint.open((tmp_path / "second" / "checkpoints" / "best").resolve()).step == at

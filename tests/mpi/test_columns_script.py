"""The example and a config on a prepared table under mpirun: a kill changes no bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ecrm.checkpoint.saved_model import open_model
from ecrm.data.columns.prepare import prepare_table
from support.columns import schema_of
from support.commands import ecrm
from support.drilling import Run
from support.examples import EXAMPLES, dead_ranks, run_example

TWO_RANKS = ("--servers", "1", "--trainers", "1", "--spares", "0", "--protection", "none")
SCHEMA = """[columns]
bought = { kind = "label" }
user_id = { kind = "categorical", rows = 1000 }
movie = { kind = "categorical", table = "movie", vocabulary = true }
genres = { kind = "multi_hot", vocabulary = true }
seen = { kind = "weighted", table = "movie", vocabulary = true }
price = { kind = "dense" }
visited_at = { kind = "time" }
"""


def prepared_visits(folder: Path) -> Path:
    """A table of 4,000 made visits with features of every kind."""
    words = [EXAMPLES / "make_visits.py", folder / "visits", "--visits", "2000"]
    subprocess.run([sys.executable, *words], check=True, timeout=60)
    files = sorted(str(path) for path in (folder / "visits").iterdir())
    manifest = prepare_table(files, str(folder / "data"), schema_of(folder, SCHEMA))
    assert [source["rows"] for source in manifest["sources"]] == [2000, 2000]
    return folder / "data"


def test_killed_ranks_change_no_bit_of_a_model_of_parquet_files(tmp_path):
    prepared_visits(tmp_path)
    runs = []
    for name, words in (
        ("killed", ("--kill", "1@9:parity", "--kill", "4@20")),
        ("calm", TWO_RANKS),
    ):
        (tmp_path / name).mkdir()
        own = (str(tmp_path / "data"), "--steps", "30")
        runs.append(run_example("train_columns.py", tmp_path / name, words, own))
        assert runs[-1].code == 0, runs[-1].output
        assert "AUC of held-out rows: 0." in runs[-1].output
        assert os.path.exists(tmp_path / name / "model.safetensors")
    killed, calm = runs
    assert dead_ranks(killed) == [1, 4] and dead_ranks(calm) == []
    assert killed.model == calm.model


@pytest.mark.drill
def test_killed_ranks_change_no_bit_of_a_config_of_parquet_files(tmp_path):
    """Two towers on the shipped config, with every kind of column, evaluated on the way."""
    sets = (
        f"data.path={prepared_visits(tmp_path)}",
        "model.architecture=two_tower",
        'model.user_columns=["user_id","seen","price"]',
        "train.global_batch=128",
        "train.steps=30",
        "train.eval_every_steps=15",
        "checkpoint.keep_best=auc",
    )
    words = ("launch", "columns", *(word for each in sets for word in ("--set", each)))
    runs = []
    for name, more in (("killed", ("--kill", "1@9:parity", "--kill", "5@20")), ("calm", ())):
        done = ecrm(*words, "--run-dir", str(tmp_path / name), *more, timeout=200)
        runs.append(Run(done.returncode, done.stdout + done.stderr, tmp_path / name))
        assert runs[-1].code == 0, runs[-1].output
    killed, calm = (run.summary for run in runs)
    assert dead_ranks(runs[0]) == [1, 5] and dead_ranks(runs[1]) == []
    assert killed["model_sha256"] == calm["model_sha256"]
    assert killed["eval_auc"] == calm["eval_auc"] > 0.5 and calm["eval_samples"] == 400
    best = tmp_path / "calm" / "checkpoints" / "best"
    done = ecrm("export", str(best), "--output", str(tmp_path / "best.safetensors"))
    assert done.returncode == 0, done.stderr
    tensors, _ = open_model(tmp_path / "best.safetensors")
    assert {name.split(".")[0] for name in tensors} == {"sparse_arch", "user_tower", "item_tower"}

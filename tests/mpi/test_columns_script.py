"""The example on a prepared table under mpirun: a kill changes no bit."""

import os
import subprocess
import sys

from ecrm.data.columns.prepare import prepare_table
from support.columns import schema_of
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


def test_killed_ranks_change_no_bit_of_a_model_of_parquet_files(tmp_path):
    words = [EXAMPLES / "make_visits.py", tmp_path / "visits", "--visits", "2000"]
    subprocess.run([sys.executable, *words], check=True, timeout=60)
    files = sorted(str(path) for path in (tmp_path / "visits").iterdir())
    manifest = prepare_table(files, str(tmp_path / "data"), schema_of(tmp_path, SCHEMA))
    assert [source["rows"] for source in manifest["sources"]] == [2000, 2000]
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

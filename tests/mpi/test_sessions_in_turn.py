"""Several sessions in one script: each has a run of its own, with the ranks that are left."""

import json
import time

import pytest
import torch

from support.commands import ECRM, ecrm
from support.lives import life
from support.paths import PROGRAMS

SCRIPT = str(PROGRAMS / "two_sessions.py")
LAYOUT = ("--servers", "3", "--trainers", "2", "--spares", "1", "-k", "2", "-m", "1")
FOLDERS = ("run", "run/session-2", "run/session-3")
SAVED = tuple(f"model_{number}.safetensors" for number in (1, 2, 3))


def results(folder):
    """The hash of each session's model, and the bytes of each file."""
    summaries = [json.loads((folder / name / "summary.json").read_text()) for name in FOLDERS]
    hashes = [summary["model_sha256"] for summary in summaries]
    return hashes, [(folder / name).read_bytes() for name in SAVED]


def begin_in(folder):
    """Make a folder with the model that the first session begins with."""
    folder.mkdir()
    random = torch.Generator().manual_seed(5)
    shapes = {
        "bags.embedding_bags.t_a.weight": (300, 8),
        "bags.embedding_bags.t_b.weight": (300, 8),
        "dense.0.weight": (8, 16),
        "dense.0.bias": (8,),
        "dense.2.weight": (1, 8),
        "dense.2.bias": (1,),
    }
    model = {name: torch.randn(shape, generator=random) / 4 for name, shape in shapes.items()}
    torch.save(model, folder / "begun.pt")


def train(folder, *words, own=(), layout=LAYOUT):
    begin_in(folder)
    line = ("launch", SCRIPT, *layout, "--run-dir", "run", *words, "--", *own)
    return ecrm(*line, cwd=folder, timeout=150)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm") / "here"
    done = train(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(set(results(folder)[0])) == 3
    return results(folder)


def test_ranks_that_die_in_one_session_are_missing_in_the_next_and_cost_no_bit(tmp_path, calm):
    done = train(tmp_path / "here", "--kill", "1@7:parity", own=("2:5=3", "2:9=4", "3:9=0"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(tmp_path / "here") == calm
    told = [json.loads((tmp_path / "here" / name / "summary.json").read_text()) for name in FOLDERS]
    assert [[rank for died in each["failures"] for rank in died["ranks"]] for each in told] == [
        [1],
        [3, 4],
        [0],
    ]


@pytest.mark.drill
def test_a_session_without_a_spare_is_laid_out_to_survive_a_death_again(tmp_path, calm):
    """Rank 0 dies in the first session. In the second, rank 1 has two shards, and dies."""
    layout = (
        "--set",
        "cluster.layout=colocated",
        "--servers",
        "4",
        "--trainers",
        "4",
        "--spares",
        "0",
    )
    layout += ("-k", "2", "-m", "1")
    done = train(tmp_path / "here", own=("1:9=0", "2:9=1"), layout=layout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(tmp_path / "here") == calm


@pytest.mark.drill
@pytest.mark.parametrize("number", [2])
def test_a_resume_trains_no_session_again_that_is_through(tmp_path, calm, number):
    line = ["launch", SCRIPT, *LAYOUT, "--run-dir", "run", "--resume", "auto"]
    folder = tmp_path / "here"
    begin_in(folder)
    begun = folder / FOLDERS[number] / "events.jsonl"

    def is_under_way(_):
        if not begun.exists() or '"start"' not in begun.read_text():
            return False
        time.sleep(0.3)  # some of its 20 steps
        return True

    code, output = life([*ECRM, *line], is_under_way, cwd=folder)
    assert code is None, output
    assert not (folder / FOLDERS[number] / "summary.json").exists()
    done = ecrm(*line, cwd=folder, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(folder) == calm
    starts = [
        event
        for event in map(json.loads, (folder / "run/events.jsonl").read_text().splitlines())
        if event["event"] == "start"
    ]
    assert starts[-1]["resumed"]["step"] == 20, "the first session is loaded, not trained"
    again = ecrm(*line, cwd=folder, timeout=60)
    assert (again.returncode, again.stdout) == (
        0,
        "run holds the complete run of 3 sessions: nothing is left to do; to train more steps, "
        "type --resume run --run-dir NEW\n",
    )

"""Several sessions in one script: each has a run of its own, with the ranks that are left."""

import json
import time

import pytest

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


def train(folder, *words, own=()):
    folder.mkdir()
    line = ("launch", SCRIPT, *LAYOUT, "--run-dir", "run", *words, "--", *own)
    return ecrm(*line, cwd=folder, timeout=150)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm") / "here"
    done = train(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(set(results(folder)[0])) == 3
    return results(folder)


def test_ranks_that_die_in_one_session_are_missing_in_the_next_and_cost_no_bit(tmp_path, calm):
    done = train(tmp_path / "here", "--kill", "1@7:parity", own=("2:9=4", "3:9=0"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(tmp_path / "here") == calm
    told = [json.loads((tmp_path / "here" / name / "summary.json").read_text()) for name in FOLDERS]
    assert [[rank for died in each["failures"] for rank in died["ranks"]] for each in told] == [
        [1],
        [4],
        [0],
    ]


@pytest.mark.parametrize("number", [2])
def test_a_resume_trains_no_session_again_that_is_through(tmp_path, calm, number):
    line = ["launch", SCRIPT, *LAYOUT, "--run-dir", "run", "--resume", "auto"]
    folder = tmp_path / "here"
    folder.mkdir()
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
        "run holds the complete run: nothing is left to do\n",
    )

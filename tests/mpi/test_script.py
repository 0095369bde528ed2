"""A user's script on ranks under mpirun: it runs, and an error in it ends all ranks."""

import json
from pathlib import Path

import pytest

from ecrm.engine.events import check_event
from ecrm.run.files import STOPPED, check_summary, undescribed
from support.commands import ecrm
from support.paths import PROGRAMS

TWO = ("--servers", "1", "--trainers", "1", "--spares", "0", "--protection", "none")

SHARES = """
import sys
from ecrm.run.gather import gather_results
from ecrm.run.this_rank import this_rank

transport = this_rank().transport
said = gather_results(transport, lambda: [transport.rank, sys.argv[1]])
print("shared", sorted(said.values()))
"""

FAILS = """
from ecrm.run.this_rank import this_rank

if this_rank().transport.rank == 1:
    raise ValueError("one rank has no data")
from ecrm.run.gather import gather_results
gather_results(this_rank().transport, lambda: None)  # as a Session does
print("never")
"""


def run(tmp_path, text: str, *arguments: str):
    (tmp_path / "train.py").write_text(text)
    words = ("launch", "train.py", *TWO, "--run-dir", "run", "--", *arguments)
    return ecrm(*words, cwd=tmp_path, timeout=100)


def test_ranks_of_a_script_reach_one_another_and_one_that_trains_nothing_is_refused(tmp_path):
    done = run(tmp_path, SHARES, "x")
    assert done.stdout.count("shared [[0, 'x'], [1, 'x']]") == 2
    assert "ecrm: error: train.py has ended without training" in done.stderr
    assert done.returncode == 8
    assert not (tmp_path / "run").exists()


def test_an_error_on_one_rank_ends_all_with_its_traceback_once(tmp_path):
    done = run(tmp_path, FAILS)
    assert done.returncode == 8
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ecrm: error: ") == 1
    assert "ecrm: error: train.py failed on rank 1: ValueError: one rank has no data" in done.stderr
    assert "never" not in done.stdout


LAYOUT = ("--servers", "3", "--trainers", "2", "--spares", "1", "-k", "2", "-m", "1")


def train(tmp_path, *words: str, script: tuple[str, ...] = ("12",), first: str = ""):
    """`ecrm launch` of the script that drives a session's run by hand, once `first` is done."""
    text = (PROGRAMS / "hand_loop.py").read_text()
    (tmp_path / "train.py").write_text(first + text)
    line = ("launch", "train.py", *LAYOUT, "--set", "train.log_every_steps=4", *words)
    return ecrm(*line, "--", *script, cwd=tmp_path, timeout=100)


def summary(folder: Path) -> dict:
    found = json.loads((folder / "summary.json").read_text())
    check_summary(found)
    return found


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The folder of an undisturbed run of 12 steps."""
    folder = tmp_path_factory.mktemp("calm")
    done = train(folder, "--run-dir", "run")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "finished 12 steps at " in done.stdout
    assert "step  8/12 " in done.stdout and "rows 10.0000  committed 8" in done.stdout
    return folder / "run"


DIES = """
import os, signal
from ecrm.run.this_rank import this_rank

if this_rank().transport.rank == {rank}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "rank", [1, *(pytest.param(rank, marks=pytest.mark.drill) for rank in (0, 3))]
)
def test_a_rank_killed_before_its_session_costs_no_bit(tmp_path, calm, rank):
    """A server; the rank that reports; the main trainer."""
    done = train(tmp_path, "--run-dir", "run", first=DIES.format(rank=rank))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"! rank {rank} died in step 0 (start)" in done.stdout
    assert "Traceback" not in done.stderr
    assert summary(tmp_path / "run")["model_sha256"] == summary(calm)["model_sha256"]


NOTES_RECORDS = """
import json, logging

class Notes(logging.Handler):
    def emit(self, record):
        fields = record.levelname, record.rank, record.step, record.getMessage()
        with open("records.jsonl", "a") as file:
            file.write(json.dumps(fields) + chr(10))

logging.getLogger("ecrm").addHandler(Notes())
"""


def test_a_handler_of_the_script_gets_each_printed_line_with_rank_and_step(tmp_path):
    words = ("--run-dir", "run", "--kill", "1@4:parity")
    done = train(tmp_path, *words, first=NOTES_RECORDS)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    printed = done.stdout.splitlines()
    assert all(line in printed for *_, said in records for line in said.splitlines())
    assert all(rank in range(6) for _, rank, _, _ in records)
    begins = [(level, step, said.split()[0]) for level, _, step, said in records]
    steps = [(level, step) for level, step, word in begins if word == "step"]
    assert steps == [("INFO", 4), ("INFO", 8), ("INFO", 12)]
    (died,) = [record for record in records if record[3].startswith("! rank 1 died")]
    assert died[0] == "WARNING" and died[2] == 4


@pytest.mark.drill
def test_killed_ranks_leave_the_model_of_an_undisturbed_run(tmp_path, calm):
    done = train(tmp_path, "--run-dir", "run", "--kill", "1@4:parity", "--kill", "3@9:update")
    assert done.returncode == 0, done.stdout + done.stderr
    after, before = summary(tmp_path / "run"), summary(calm)
    assert sorted(rank for failure in after["failures"] for rank in failure["ranks"]) == [1, 3]
    assert after["model_sha256"] == before["model_sha256"]
    assert not undescribed(tmp_path / "run")
    for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines():
        check_event(json.loads(line))


@pytest.mark.drill
def test_what_dies_after_the_loop_does_not_undo_it(tmp_path, calm):
    checkpoints = ("--protection", "checkpoint", "--set", "checkpoint.every_steps=5")
    done = train(tmp_path, "--run-dir", "run", "--kill", "1@12:finish", *checkpoints)
    assert done.returncode == 0, done.stdout + done.stderr
    after = summary(tmp_path / "run")
    assert [failure["ranks"] for failure in after["failures"]] == [[1]]
    assert after["model_sha256"] == summary(calm)["model_sha256"]


@pytest.mark.drill
def test_a_script_goes_on_where_it_was_stopped_and_its_model_must_be_the_same(tmp_path, calm):
    done = train(tmp_path, "--run-dir", "run", script=("12", "--stop-in", "6"))
    assert done.returncode == 130, done.stdout + done.stderr
    stopped = json.loads((tmp_path / "run" / "stopped.json").read_text())
    check_summary(stopped, STOPPED)
    assert 6 <= stopped["steps"] < 12
    other = train(tmp_path, "--run-dir", "other", "--resume", "run", script=("12", "5"))
    assert other.returncode == 2
    assert "is of another model: tensor 0.weight is 4 x 8 there, 5 x 8 here" in other.stderr
    assert other.stderr.count("\n") == 1
    again = train(tmp_path, "--run-dir", "run", "--resume", "auto")
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"from step {stopped['steps']}, " in again.stdout
    assert summary(tmp_path / "run")["model_sha256"] == summary(calm)["model_sha256"]
    once_more = train(tmp_path, "--run-dir", "run", "--resume", "auto")
    assert (once_more.returncode, "nothing is left to do" in once_more.stdout) == (0, True)


DIES_ONCE_RESUMED = """
import os, signal
from ecrm.process.ready import ReadyMemory

def start(self, engine, right=ReadyMemory.start):
    if engine.step and engine.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    right(self, engine)

ReadyMemory.start = start
"""


@pytest.mark.drill
def test_a_rank_that_dies_when_all_is_loaded_and_no_step_has_begun_is_recovered(tmp_path, calm):
    done = train(tmp_path, "--run-dir", "run", script=("12", "--stop-in", "6"))
    assert done.returncode == 130, done.stdout + done.stderr
    words = ("--run-dir", "run", "--resume", "auto", "--set", "storage.prefault=true")
    again = train(tmp_path, *words, first=DIES_ONCE_RESUMED)
    assert again.returncode == 0, again.stdout + again.stderr
    after = summary(tmp_path / "run")
    assert [failure["ranks"] for failure in after["failures"]] == [[1]]
    assert after["model_sha256"] == summary(calm)["model_sha256"]


def events(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for event in found:
        check_event(event)
    return found


@pytest.mark.drill
def test_what_fails_on_two_ranks_ends_the_run_with_both_tracebacks(tmp_path):
    done = train(tmp_path, "--run-dir", "run", script=("12", "--fail-in", "5"))
    assert done.returncode == 8, done.stdout + done.stderr
    assert done.stderr.count("Traceback") == done.stderr.count("raise ValueError") == 2
    assert done.stderr.count("ecrm: error: ") == 1
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["exit_code"] == 8
    assert failure["message"] == (
        "train.py failed on rank 5 in step 5, slot 1: ValueError: no such sample (as on rank 4 "
        "before)"
    )
    assert not (tmp_path / "run" / "summary.json").exists()
    told = [event for event in events(tmp_path / "run") if event["event"] == "slot_failed"]
    assert [(event["rank"], event["step"], event["slot"]) for event in told] == [(4, 5, 1)]


@pytest.mark.drill
def test_a_body_that_kills_its_ranks_ends_the_run_at_the_second(tmp_path):
    done = train(tmp_path, "--run-dir", "run", script=("12", "--die-in", "5"))
    assert done.returncode == 8, done.stdout + done.stderr
    assert "! rank 4 died while the script's own code ran, in step 5, slot 1; if" in done.stdout
    assert "ecrm: error: ranks 4, 5 died in step 5, slot 1, one after the other" in done.stderr
    assert done.stderr.count("ecrm: error: ") == 1
    deaths = [event for event in events(tmp_path / "run") if event["event"] == "failure"]
    assert [event["ranks"] for event in deaths] == [[4]]


ASKS_AND_SAVES_ALONE = """
try:
    input()
except EOFError:
    print("nothing to read", flush=True)

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm

config = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])
model = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
model = torch.nn.Sequential(model)
session = ecrm.Session(model, slots=1)
ids = KeyedJaggedTensor(["f"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
for batch in session.steps(lambda step, slot: ids, 3):
    session.model(batch).values().mean().backward()
if session.is_main:
    session.save("model.pt")
"""


@pytest.mark.drill
def test_neither_input_nor_a_model_that_one_rank_saves_alone_has_the_others_wait(tmp_path):
    done = run(tmp_path, ASKS_AND_SAVES_ALONE)
    assert done.stdout.count("nothing to read") == 2
    assert done.returncode == 8, done.stdout + done.stderr
    assert "rank 0 at the end of the script; rank 1 at session.save: call on every rank" in (
        done.stderr
    )
    assert done.stderr.count("ecrm: error: ") == 1 and not (tmp_path / "model.pt").exists()


@pytest.mark.drill
def test_a_slot_that_hangs_is_told_and_its_rank_is_killed(tmp_path):
    (tmp_path / "train.py").write_text((PROGRAMS / "hanging_slot.py").read_text())
    line = ("launch", "train.py", *LAYOUT, "--set", "cluster.stuck_seconds=14")
    done = ecrm(*line, "--", str(tmp_path / "tried"), cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stdout.splitlines() if "nothing has gone on" in line]
    assert "in step 3 (" in told and told.endswith("rank 4 is at step 3, slot 1")
    assert "! rank 4: it has worked by itself for 14 s, without a call" in done.stderr
    assert "rank 4 died in step 3" in done.stdout

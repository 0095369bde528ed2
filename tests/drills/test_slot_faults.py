"""A script that raises, or kills its rank, in one slot: the run loses a rank, or ends."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from ecrm.engine.events import check_event
from ecrm.run.files import check_summary, undescribed
from support.commands import ecrm
from support.drilling import Run
from support.paths import PROGRAMS

LAYOUT = ("--servers", "3", "--trainers", "2", "--spares", "1", "-k", "2", "-m", "1")
ONE_TRAINER = ("--servers", "3", "--trainers", "1", "--spares", "0", "-k", "2", "-m", "1")
PARTS = {"body": "step 5, slot 1", "collate": "the batch of step 5, slot 1"}


def train(folder: Path, *own: str, layout: tuple[str, ...] = LAYOUT, **options: Any) -> Run:
    copy(PROGRAMS / "bad_sample.py", folder / "train.py")
    line = ("launch", "train.py", *layout, "--run-dir", "run", "--", *own)
    done = ecrm(*line, cwd=folder, timeout=200, **options)
    return Run(done.returncode, done.stdout + done.stderr, folder / "run")


def events(run: Run, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    for event in found:
        check_event(event)
    return [event for event in found if event["event"] == name]


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Run:
    run = train(tmp_path_factory.mktemp("calm"))
    assert run.code == 0 and run.summary["slot_faults"] == []
    return run


@pytest.mark.parametrize("place", PARTS)
@pytest.mark.parametrize("what", ["raises", "kills"])
def test_what_happens_on_one_rank_alone_costs_that_rank_and_no_bit(tmp_path, calm, what, place):
    run = train(tmp_path, f"--{what}", place, "--once", "once")
    assert run.code == 0 and (tmp_path / "once").exists(), run.output
    assert run.output.count("Traceback") == (what == "raises")
    assert "ecrm: error: " not in run.output
    (told,) = run.summary["slot_faults"]
    assert [failure["ranks"] for failure in run.summary["failures"]] == [[told["rank"]]]
    assert (told["step"], told["slot"]) == (5, 1)
    assert told["part"] == ("body" if place == "body" else "batch")
    assert (told["error"] is None) == (what == "kills")
    assert len(events(run, "slot_failed")) == 1
    assert run.model == calm.model
    check_summary(run.summary)
    assert not undescribed(run.folder)


@pytest.mark.parametrize("place", PARTS)
@pytest.mark.parametrize("what", ["raises", "kills"])
def test_what_happens_on_every_rank_ends_the_run_at_the_second(tmp_path, what, place):
    run = train(tmp_path, f"--{what}", place)
    assert run.code == 8, run.output
    assert run.output.count("ecrm: error: ") == 1
    message = json.loads((run.folder / "failure.json").read_text())["message"]
    assert f"in {PARTS[place]}" in message
    if what == "raises":
        assert run.output.count("Traceback") == run.output.count("ValueError: no such sample\n")
        assert run.output.count("Traceback") == 2
        assert message.endswith("ValueError: no such sample (as on rank 4 before)")
    else:
        assert message.startswith("ranks 4, 5 died in ")
    assert [event["ranks"] for event in events(run, "failure")] == [[4]]


HOOKS = {"before_step": "before_step of step 5", "every": "a function for session.every at step 5"}


@pytest.mark.parametrize("place", HOOKS)
def test_an_error_in_what_all_ranks_run_ends_the_run_at_once(tmp_path, place):
    run = train(tmp_path, "--raises", place)
    assert run.code == 8, run.output
    assert run.output.count("Traceback") == run.output.count("ecrm: error: ") == 1
    assert f" in {HOOKS[place]}: ValueError: no such sample" in run.output
    assert events(run, "failure") == []


@pytest.mark.parametrize("place", HOOKS)
def test_a_death_in_what_all_ranks_run_costs_that_rank_and_no_bit(tmp_path, calm, place):
    run = train(tmp_path, "--kills", place, "--once", "once")
    assert run.code == 0 and (tmp_path / "once").exists(), run.output
    (told,) = run.summary["slot_faults"]
    assert [failure["ranks"] for failure in run.summary["failures"]] == [[told["rank"]]]
    assert (told["step"], told["part"]) == (5, place)
    assert run.model == calm.model
    check_summary(run.summary)


def test_a_second_death_in_one_function_for_every_ends_the_run(tmp_path):
    run = train(tmp_path, "--kills", "every")
    assert run.code == 8, run.output
    assert f"ranks 3, 4 died in {HOOKS['every']}, one after the other" in run.output


def test_with_one_trainer_an_error_ends_the_run_at_once(tmp_path):
    run = train(tmp_path, "--raises", "body", layout=ONE_TRAINER)
    assert run.code == 8, run.output
    assert run.output.count("Traceback") == 1
    assert "(no other trainer or spare is left to try it)" in run.output
    assert events(run, "failure") == []


def limit_addresses() -> None:
    """So that ranks share no memory, as each on a host of its own."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 46, 1 << 46))


def test_where_no_rank_can_know_the_third_death_ends_the_run(tmp_path):
    run = train(tmp_path, "--kills", "body", preexec_fn=limit_addresses)
    assert run.code == 8, run.output
    assert "died in step 5, each running slot 1, one after the other" in run.output
    assert len(events(run, "failure")) == 2 and events(run, "slot_failed") == []

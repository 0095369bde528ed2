"""The folders of a script's sessions: which one says how a run has ended."""

import json
from types import SimpleNamespace

import pytest

from ecrm.config import load_config
from ecrm.launch.launcher import RunFailed, judge
from ecrm.launch.supervise import MpirunEnding
from ecrm.launch.watch import Watch
from ecrm.run.auto_resume import AUTO_RESUME, look
from ecrm.run.session_folders import newest_session, session_folder
from ecrm.run.spec import RunSpec
from ecrm.run.this_rank import ThisRank

LAUNCH = "abc"
ENDING = MpirunEnding(exit_code=0, stopped_by=None, launch=LAUNCH)


def write(path, **fields):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps({"launch": LAUNCH, **fields}))


def begun(run_dir):
    (run_dir / "events.jsonl").write_text(json.dumps({"event": "start", "time": 0.0}) + "\n")
    write(run_dir / "summary.json", completed=True)


def test_the_newest_session_is_the_last_without_a_gap(tmp_path):
    assert newest_session(tmp_path) == session_folder(tmp_path, 1) == tmp_path
    for number in (2, 3, 5):
        session_folder(tmp_path, number).mkdir()
    assert newest_session(tmp_path) == tmp_path / "session-3"


def test_a_run_is_complete_once_its_last_session_is(tmp_path):
    begun(tmp_path)
    judge(tmp_path, ENDING)
    assert look(tmp_path, AUTO_RESUME).complete
    (tmp_path / "session-2").mkdir()
    with pytest.raises(RunFailed, match=r"did not complete \(mpirun ended with 0\)"):
        judge(tmp_path, ENDING)
    assert not look(tmp_path, AUTO_RESUME).complete
    write(tmp_path / "session-2" / "summary.json", completed=True)
    judge(tmp_path, ENDING)
    assert look(tmp_path, AUTO_RESUME).complete


def test_a_script_may_have_fewer_sessions_than_its_folder(tmp_path):
    begun(tmp_path)
    for number in (2, 3):
        write(tmp_path / f"session-{number}" / "events.jsonl")
    write(tmp_path / "session-2" / "summary.json", completed=True, sessions=None)
    assert not look(tmp_path, AUTO_RESUME).complete, "a third has begun"
    write(tmp_path / "session-2" / "summary.json", completed=True, sessions=2)
    judge(tmp_path, ENDING)
    assert look(tmp_path, AUTO_RESUME).complete


@pytest.mark.parametrize("name", ["summary.json", "stopped.json"])
def test_a_model_that_is_not_kept_is_told_whichever_session_it_is_of(tmp_path, name):
    begun(tmp_path)
    (tmp_path / "session-2").mkdir()
    write(tmp_path / name, completed=False, checkpoint_failed="No space left")
    with pytest.raises(RunFailed, match="the model is not kept: .* No space left") as error:
        judge(tmp_path, ENDING)
    assert error.value.exit_code == 7


@pytest.mark.parametrize("where", [".", "session-2", "session-3"])
def test_a_run_that_has_stopped_says_in_which_session(tmp_path, where):
    begun(tmp_path)
    for number in (2, 3):
        write(tmp_path / f"session-{number}" / "events.jsonl")
    write(tmp_path / where / "stopped.json")
    with pytest.raises(RunFailed, match="stopped when asked to") as error:
        judge(tmp_path, ENDING)
    assert error.value.exit_code == 130
    assert str(tmp_path / where / "stopped.json") in str(error.value)


def test_a_failure_between_two_sessions_is_the_runs(tmp_path):
    begun(tmp_path)
    (tmp_path / "session-2").mkdir()
    write(tmp_path / "failure.json", message="no", exit_code=8)
    with pytest.raises(RunFailed) as error:
        judge(tmp_path, ENDING)
    assert error.value.exit_code == 8


class Kept:
    def __init__(self, folder, heard):
        self.name, self.heard = folder.name, heard

    def take(self, events):
        self.heard += [(self.name, event["step"]) for event in events]

    def close(self):
        self.heard.append((self.name, "closed"))


def test_a_watch_goes_on_with_the_events_of_the_next_session(tmp_path):
    heard = []
    run = tmp_path / "run"
    run.mkdir()
    watch = Watch(run, lambda folder: [Kept(folder, heard)])

    def event(folder, step):
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "progress", "step": step, "time": 0.0}) + "\n")

    event(run, 1)
    watch.look()
    event(run, 2)
    (run / "session-2").mkdir()
    event(run / "session-2", 3)
    watch.look()
    watch.ended()
    assert heard == [
        ("run", 1),
        ("run", 2),
        ("run", "closed"),
        ("session-2", 3),
        ("session-2", "closed"),
    ]


def test_a_watch_of_a_resumed_run_follows_the_sessions_as_they_go_on(tmp_path):
    """Folders of an earlier start are there; the first session has events of this start first."""
    heard = []
    for folder in (tmp_path, tmp_path / "session-2", tmp_path / "session-3"):
        folder.mkdir(exist_ok=True)
        (folder / "events.jsonl").write_text(
            json.dumps({"event": "progress", "step": 1, "time": 0.0}) + "\n"
        )
    watch = Watch(tmp_path, lambda folder: [Kept(folder, heard)])
    watch.began(SimpleNamespace(stdout=None, stderr=None))
    for number, step in ((1, 5), (2, 6), (2, 7), (3, 8)):
        with (session_folder(tmp_path, number) / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "progress", "step": step, "time": 0.0}) + "\n")
        watch.look()
    assert [told for told in heard if told[1] != "closed"] == [
        (tmp_path.name, 5),
        ("session-2", 6),
        ("session-2", 7),
        ("session-3", 8),
    ]
    assert [told for told in heard if told[1] == "closed"] == [
        (tmp_path.name, "closed"),
        ("session-2", "closed"),
    ]


def test_each_session_has_mapped_files_of_its_own(tmp_path):
    config = load_config("quickstart", [f"mapped.path={tmp_path / 'files'}"])
    rank = ThisRank(None, RunSpec(None, config, run_dir=tmp_path / "run"), None, None)
    assert rank.spec_of(1).config.mapped.path == str(tmp_path / "files")
    assert rank.spec_of(2).config.mapped.path == str(tmp_path / "files" / "session-2")

"""`ecrm launch SCRIPT.py`: which words and which config a script is run with."""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ecrm.base.errors import EcrmError, LostTouch, ScriptFailed, UsageError
from ecrm.config.check import KEYS
from ecrm.config.script import DECIDED_KEYS, Script
from ecrm.engine.hooks import Hooks
from ecrm.run.run_script import ScriptFailure, _execute, _fail
from ecrm.run.slot_faults import Place
from ecrm.run.this_rank import this_rank
from ecrm.run.user_code import UserCode
from support.commands import assert_one_line, forked_ecrm


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


def launch(script: Path, *words: str):
    return forked_ecrm("launch", script.name, "--dry-run", *words, cwd=script.parent)


def test_short_options_the_config_and_the_scripts_own_words_reach_the_ranks(script):
    (script.parent / "mine.toml").write_text("[storage]\nprefault = true\n")
    counts = ("--servers", "4", "--trainers", "3", "--spares", "1", "-k", "2", "-m", "2")
    rest = ("--config", "mine.toml", "--kill", "1@60:parity", "--run-dir", "x")
    done = launch(script, *counts, *rest, "--", "--epochs", "2", "a b")
    assert (done.returncode, done.stderr) == (0, "")
    line, *told = done.stdout.splitlines()
    assert all(each.startswith("# ") for each in told)
    words = shlex.split(line)
    at = words.index("-n")
    assert words[at : at + 2] == ["-n", "8"]
    assert words[at + 2 : at + 9] == [
        *(sys.executable, "-m", "ecrm", "train"),
        *("train.py", "--config", "mine.toml"),
    ]
    for key in ("cluster.servers=4", "cluster.trainers=3", "protection.k=2", "protection.m=2"):
        assert words[words.index(key) - 1] == "--set"
    assert words[-5:] == ["1@60:parity", "--", "--epochs", "2", "a b"]
    assert not (script.parent / "x").exists()


def test_short_options_are_for_configs_too(criteo_rows, tmp_path):
    data = ("--set", f"data.path={criteo_rows}")
    done = forked_ecrm("launch", "tiny", "--dry-run", *data, "--spares", "3", cwd=tmp_path)
    assert done.returncode == 0
    assert "-n 8 " in done.stdout  # 3 servers, 2 trainers


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "train.steps=5"), "train.steps is for a run of a config"),
        (("--set", "model.embedding_dim=8"), "[model] is for a run of a config"),
        (("--config", "steps.toml"), "steps.toml: train.global_batch is for a run of a config"),
        (("--servers", "2"), "protection.k + protection.m = 4 needs at least 4 servers"),
        (("--kill", "9@3"), "there is no rank 9, ranks are 0 to 6"),
        (("--run-dir", "full"), "--run-dir full: not empty"),
    ],
)
def test_what_cannot_run_is_told_before_anything_starts(script, words, said):
    (script.parent / "steps.toml").write_text("[train]\nglobal_batch = 64\n")
    (script.parent / "full").mkdir()
    (script.parent / "full" / "notes").touch()
    assert_one_line(launch(script, *words), said)


def test_a_script_that_is_not_there(tmp_path):
    assert_one_line(forked_ecrm("launch", "nowhere.py", cwd=tmp_path), "no script 'nowhere.py'")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--config", "mine.toml"), "--config mine.toml: goes with a script"),
        (("--", "--lr", "1"), "--lr 1: arguments after -- go to a script"),
    ],
)
def test_words_for_scripts_are_refused_with_a_config(words, said):
    assert_one_line(forked_ecrm("launch", "tiny", *words), said)


def test_one_rank_without_mpirun_says_what_to_type(script):
    done = forked_ecrm("train", "train.py", "-k", "2", "--", "--lr", "1", cwd=script.parent)
    assert_one_line(done, "type ecrm launch train.py --set protection.k=2 -- --lr 1, or mpirun")


def test_keys_that_a_script_decides_are_keys():
    assert set(DECIDED_KEYS) <= set(KEYS)


def test_the_config_of_a_script_needs_nothing_but_may_have_any_number_of_trainers(tmp_path):
    script = Script(tmp_path / "train.py")
    assert script.load_config().world_size == 7
    assert script.load_config(["cluster.trainers=3"]).slots == 3  # 2048 samples cannot be split
    with pytest.raises(UsageError, match='train.py: cluster.trainers is "many": must be'):
        script.load_config(["cluster.trainers=many"])


def test_a_script_started_by_python_is_told_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my/train.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "my/train.py", raising=False)
    with pytest.raises(UsageError, match="without ecrm: type ecrm launch my/train.py"):
        this_rank()


class Leaving:
    """A run that cannot see its rank off: calls fail again and again, and it ends with `error`."""

    rank = 4

    def __init__(self, error: EcrmError) -> None:
        self.error = error
        self.engine = self.recovery = self
        self.state = SimpleNamespace(hooks=Hooks(inquest=UserCode()))

    def recover(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "leaves"),
    [(ScriptFailed("no sample"), True), (LostTouch("calls fail"), False)],
    ids=["tried elsewhere", "lost touch"],
)
def test_only_a_rank_that_leaves_says_so(script, capsys, error, leaves):
    rank = FakeRank(Script(script))
    rank.part = Leaving(error)
    with pytest.raises(type(error)):
        _fail(rank, ScriptFailure("no sample", "Traceback: mine\n", Place(7, 1)))
    told = capsys.readouterr().err
    assert "Traceback: mine" in told
    assert ("rank 4 leaves" in told) == error.told == leaves


class FakeRank:
    """What `_execute` needs of a rank that has met nobody."""

    met, part, place, number = False, None, "", 4

    def __init__(self, script: Script) -> None:
        self.script, self.transport = script, type("Transport", (), {"rank": self.number})()


def execute(tmp_path, monkeypatch, text: str, *arguments: str):
    path = tmp_path / "train.py"
    path.write_text(text)
    (tmp_path / "beside.py").write_text(
        "def fails():\n    raise ValueError('too  long\\nby far')\n"
    )
    monkeypatch.setattr(sys, "argv", ["ecrm"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    script = Script(path, arguments=arguments)
    return _execute(script, FakeRank(script))


def test_a_script_runs_as_python_runs_it(tmp_path, monkeypatch, capsys):
    text = (
        "import sys, beside\nif __name__ == '__main__':\n    print(sys.argv[1:])\n    sys.exit()\n"
    )
    assert execute(tmp_path, monkeypatch, text, "--lr", "1") is None
    assert capsys.readouterr().out == "['--lr', '1']\n"


def test_an_error_in_a_script_is_one_line_and_its_own_traceback(tmp_path, monkeypatch):
    failure = execute(tmp_path, monkeypatch, "import beside\n\nbeside.fails()\n")
    assert failure.problem.endswith("train.py failed on rank 4: ValueError: too long by far")
    lines = failure.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith('train.py", line 3, in <module>')
    assert "runpy" not in failure.traceback and "ecrm/" not in failure.traceback
    assert execute(tmp_path, monkeypatch, "import beside, sys\nsys.exit(3)\n").problem.endswith(
        "sys.exit: exit code 3"
    )
    assert "SyntaxError" in execute(tmp_path, monkeypatch, "def (:\n").traceback


def test_a_mistake_that_ecrm_has_found_is_one_line_that_says_where(tmp_path, monkeypatch):
    text = "import ecrm\n\ndef train():\n    ecrm.Indexed([], batch_size=4)\n\ntrain()\n"
    failure = execute(tmp_path, monkeypatch, text)
    assert failure.problem.endswith(
        "train.py failed on rank 4 (train.py:4): ecrm.Indexed(list): the dataset is empty, at "
        "least 1 sample is needed"
    )
    assert failure.traceback == ""


def test_words_that_a_script_refuses_are_told_by_one_rank(tmp_path, monkeypatch, capsys):
    text = (
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr', type=float)\nparser.parse_args()\n"
    )
    for rank, told in ((0, 1), (4, 0)):
        monkeypatch.setattr(FakeRank, "number", rank)
        failure = execute(tmp_path, monkeypatch, text, "--lr", "much")
        assert failure.problem.endswith("sys.exit: exit code 2")
        assert capsys.readouterr().err.count("invalid float value: 'much'") == told


def test_a_script_that_has_no_gpu_memory_left_fails_in_its_slot(tmp_path, monkeypatch):
    """So another rank tries the slot, and the second failure ends the run."""
    place = Place(5, 1)
    monkeypatch.setattr(FakeRank, "place", place)
    error = "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 MiB')"
    failure = execute(tmp_path, monkeypatch, f"import torch\nraise {error}\n")
    assert failure.place == place and "OutOfMemoryError: CUDA out of memory" in failure.problem


@pytest.mark.parametrize("kind", ["torch.AcceleratorError", "RuntimeError"])
def test_a_script_that_loses_the_gpu_ends_the_rank_at_once(tmp_path, monkeypatch, kind):
    """It stays at its place in the slot, where survivors find it."""
    monkeypatch.setattr(FakeRank, "place", Place(5, 1))
    text = f"import torch\nraise {kind}('CUDA error: an illegal memory access')\n"
    with pytest.raises(RuntimeError, match="CUDA error"):
        execute(tmp_path, monkeypatch, text)


def test_frames_of_ecrm_are_left_out_between_those_of_the_user(tmp_path, monkeypatch):
    text = (
        "from ecrm.session.data import Indexed, feed_of\nimport beside\n\n"
        "def collate(samples):\n    beside.fails()\n\n"
        "feed = feed_of(Indexed(range(9), 4, collate, workers={workers}), 1, 1, 0)\n"
        "try:\n    feed.draw(0, 0, [])\nfinally:\n    feed.close()\n"
    )
    for workers in (0, 1):
        failure = execute(tmp_path, monkeypatch, text.format(workers=workers))
        assert failure.problem.endswith(": ValueError: too long by far")
        told = failure.traceback
        for own in ("in <module>\n    feed.draw(", "in collate\n    beside.fails()", "in fails\n"):
            assert told.count(own) == 1
        assert "ecrm/session" not in told


def test_samples_that_default_collate_refuses_are_told_without_frames_of_ecrm(
    tmp_path, monkeypatch
):
    text = (
        "from ecrm.session.data import Indexed, feed_of\n\nsamples = [[1], [1, 2]]\n"
        "feed_of(Indexed(samples, 2), 1, 1, 0).draw(0, 0, [])\n"
    )
    told = execute(tmp_path, monkeypatch, text).traceback
    assert "in default_collate\n" in told and "each element in list of batch should be" in told
    assert "ecrm/session" not in told


def test_frames_of_ecrm_within_those_of_the_user_are_told(tmp_path, monkeypatch):
    text = "from ecrm.session.data import Indexed\n\nIndexed(range(9), 4).samples(0, 'four')\n"
    told = execute(tmp_path, monkeypatch, text).traceback
    assert "in <module>\n" in told and "ecrm/session/data.py" in told


@pytest.mark.parametrize("code", [1, 2])
def test_what_cannot_be_saved_is_told_with_the_line_of_the_script(tmp_path, monkeypatch, code):
    monkeypatch.setattr(FakeRank, "part", object())
    text = (
        "from ecrm.base.errors import EcrmError\nerror = EcrmError('m.pt: disk full')\n"
        f"error.exit_code, error.speaker = {code}, 4\nraise error\n"
    )
    with pytest.raises(ScriptFailed) as failed:
        execute(tmp_path, monkeypatch, text)
    line = "train.py failed on rank 4 (train.py:4): m.pt: disk full"
    assert str(failed.value).endswith(line)
    assert (failed.value.exit_code, failed.value.speaker) == (code, 4)


def test_a_process_group_is_one_line_that_says_where(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    text = "import torch.distributed as dist\n\ndist.init_process_group('gloo')\n"
    failure = execute(tmp_path, monkeypatch, text)
    assert "train.py failed on rank 4 (train.py:3): ValueError: " in failure.problem
    assert failure.problem.endswith("leave out process groups, for a session has ranks of its own")
    assert failure.traceback == ""

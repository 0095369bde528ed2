"""Paths as people type them: ~ is the home folder wherever a path is given."""

import pytest

from ecrm.base.errors import UsageError
from ecrm.base.paths import typed_path
from ecrm.cli.commands import make_parser
from ecrm.config import load_config


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["launch", "tiny", "--run-dir=~/x"], "run_dir"),
        (["launch", "tiny", "--resume=~/x"], "resume"),
        (["launch", "tiny", "--init-from=~/x"], "init_from"),
        (["launch", "tiny", "--hosts=~/x"], "hosts"),
        (["launch", "train.py", "--config=~/x"], "file"),
        (["train", "tiny", "--run-dir=~/x"], "run_dir"),
        (["drill", "tiny", "--run-dir=~/x"], "run_dir"),
        (["export", "a", "--output=~/x"], "output"),
        (["export", "~/x", "--output=a"], "checkpoint"),
        (["prepare", "criteo", "a", "--output=~/x"], "output"),
        (["generate", "criteo", "--rows=1", "--seed=1", "--output=~/x"], "output"),
    ],
)
def test_every_option_that_takes_a_path(home, words, name):
    assert str(getattr(make_parser().parse_args(words), name)) == str(home / "x")


@pytest.mark.parametrize("key", ["data.path", "mapped.path"])
def test_paths_of_a_config(home, key):
    section, _, name = key.partition(".")
    config = load_config("tiny", ["data.path=d", f"{key}=~/x"])
    assert getattr(getattr(config, section), name) == str(home / "x")


def test_a_config_with_a_byte_order_mark_in_the_home_folder(home):
    (home / "mine.toml").write_bytes(
        b'\xef\xbb\xbf[data]\r\npath = "d"\r\n[train]\r\nsteps = 7\r\n'
    )
    assert load_config("~/mine.toml").train.steps == 7


def test_a_home_folder_that_is_not_there():
    with pytest.raises(UsageError, match="no such home folder; type the whole path"):
        typed_path("~nobody-has-this-name/x")

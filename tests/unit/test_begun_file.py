"""A script that saves over the file which it has loaded can still be resumed."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ecrm.base.errors import UsageError
from ecrm.base.opened_file import OpenedFile
from ecrm.run.auto_resume import AUTO_RESUME
from ecrm.run.begun_file import BegunFile


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "m.pt"
    path.write_bytes(b"begun with")
    with path.open("rb") as file:
        yield path, OpenedFile(path, file)


def saved_over(path: Path, begun: BegunFile, opened: OpenedFile, content: bytes) -> None:
    replace(begun, opened=opened).keep(path)
    new = path.with_name("new")
    new.write_bytes(content)
    new.rename(path)


def goes_on(run_dir: Path, from_: Path | None = None) -> Path:
    """A run folder with which --resume auto goes on, from a run before."""
    run_dir.mkdir(exist_ok=True)
    event = {"time": 1.0, "event": "start", "resumed": {"from": str(from_ or run_dir), "step": 1}}
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    return run_dir


def test_the_file_of_before_is_kept_until_the_run_is_complete(model, tmp_path):
    path, opened = model
    begun = BegunFile.of(path, tmp_path / "run", None)
    assert begun.to_load() == path
    for content in (b"after 10 steps", b"after 20 steps"):
        saved_over(path, begun, opened, content)
        again = BegunFile.of(path, goes_on(tmp_path / "run"), AUTO_RESUME)
        assert path.read_bytes() == content
        assert again.to_load().read_bytes() == b"begun with"
        opened.check()
    begun.forget()
    assert again.to_load() == path
    begun.forget()


def test_another_run_begins_with_the_file_that_is_named(model, tmp_path):
    """Also with --resume auto, where there is nothing to go on from."""
    path, opened = model
    saved_over(path, BegunFile.of(path, tmp_path / "failed", None), opened, b"new")
    for resume in (None, AUTO_RESUME):
        assert BegunFile.of(path, tmp_path / "next", resume).to_load() == path
    assert BegunFile.of(path, goes_on(tmp_path / "third"), AUTO_RESUME).to_load() == path
    begins_anew = BegunFile.of(path, tmp_path / "failed", AUTO_RESUME)
    assert begins_anew.to_load() == path and not begins_anew.own.exists()


def test_a_run_that_goes_on_from_another_has_its_file_and_keeps_it(model, tmp_path):
    path, opened = model
    saved_over(path, BegunFile.of(path, goes_on(tmp_path / "one"), None), opened, b"new")
    checkpoint = tmp_path / "one" / "checkpoints" / "step-00000010"
    second = BegunFile.of(path, tmp_path / "two", checkpoint)
    assert second.to_load().read_bytes() == b"begun with"
    again = BegunFile.of(path, goes_on(tmp_path / "two", checkpoint), AUTO_RESUME)
    assert again.to_load() == second.own and second.own.read_bytes() == b"begun with"


def test_a_link_to_the_file_is_the_file(model, tmp_path):
    path, opened = model
    latest = tmp_path / "latest.pt"
    latest.symlink_to(path)
    saved_over(path, BegunFile.of(latest, tmp_path / "run", None), opened, b"new")
    for name in (latest, path):
        again = BegunFile.of(name, goes_on(tmp_path / "run"), AUTO_RESUME)
        assert again.to_load().read_bytes() == b"begun with"


def test_another_file_is_not_kept(model, tmp_path):
    path, opened = model
    begun = BegunFile.of(path, tmp_path / "run", None)
    other = tmp_path / "other.pt"
    replace(begun, opened=opened).keep(other)
    other.write_bytes(b"another")
    replace(begun, opened=opened).keep(other)
    assert not begun.own.exists()


def test_a_file_system_without_second_names_is_told(model, monkeypatch, tmp_path):
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    path, opened = model
    with pytest.raises(UsageError, match="has begun with this file, .*: save under another name"):
        replace(BegunFile.of(path, tmp_path / "run", None), opened=opened).keep(path)

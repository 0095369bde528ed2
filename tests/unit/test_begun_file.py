"""A script that saves over the file which it has loaded can still be resumed."""

import os

import pytest

from ecrm.errors import UsageError
from ecrm.opened_file import OpenedFile
from ecrm.session.begun_file import beside, file_to_load, forget, keep


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "m.pt"
    path.write_bytes(b"begun with")
    with path.open("rb") as file:
        yield path, OpenedFile(path, file)


def saved_over(path, opened, content: bytes) -> None:
    keep(path, opened)
    new = path.with_name("new")
    new.write_bytes(content)
    new.rename(path)


def test_the_file_of_before_is_kept_until_the_run_is_complete(model):
    path, opened = model
    assert file_to_load(path, resumes=True) == path
    for content in (b"after 10 steps", b"after 20 steps"):
        saved_over(path, opened, content)
        assert path.read_bytes() == content
        assert file_to_load(path, resumes=True).read_bytes() == b"begun with"
        opened.check()
    assert file_to_load(path, resumes=False) == path
    forget(path)
    assert not beside(path).exists() and path.exists()
    forget(path)


def test_another_file_is_not_kept(model, tmp_path):
    _, opened = model
    other = tmp_path / "other.pt"
    keep(other, opened)
    other.write_bytes(b"another")
    keep(other, opened)
    assert not beside(other).exists()


def test_what_a_run_before_has_left_is_replaced(model):
    path, opened = model
    beside(path).write_bytes(b"of an earlier run")
    saved_over(path, opened, b"new")
    assert beside(path).read_bytes() == b"begun with"


def test_a_file_system_without_second_names_is_told(model, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    path, opened = model
    with pytest.raises(UsageError, match="has begun with this file, .*: save under another name"):
        keep(path, opened)

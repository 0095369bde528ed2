"""Drafts of an epoch: a rank of an earlier epoch cannot rename any more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ecrm.base.epoch_drafts import EpochDrafts, left_in
from ecrm.checkpoint.folder import CheckpointFolder, find
from ecrm.checkpoint.manifest import Manifest
from ecrm.run.run_folder import SUMMARY_DRAFT, RunFolder


def writer(folder: Path, epoch: int) -> EpochDrafts:
    drafts = EpochDrafts(folder)
    drafts.begin(epoch)
    return drafts


def test_before_the_first_epoch_drafts_lie_beside_their_files(tmp_path):
    assert EpochDrafts(tmp_path).path == tmp_path


def test_a_draft_of_an_earlier_epoch_is_gone_and_none_can_be_made(tmp_path):
    old = writer(tmp_path, 0)
    (old.path / "draft").write_text("old")
    new = writer(tmp_path, 2)
    assert [*new.path.iterdir()] == [] and left_in(tmp_path) == [tmp_path / ".epoch-2"]
    with pytest.raises(FileNotFoundError):
        os.replace(old.path / "draft", tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        (old.path / "draft").write_text("again")
    with pytest.raises(FileNotFoundError, match="a later epoch has begun"):
        old.begin(1)
    (new.path / "draft").write_text("new")
    os.replace(new.path / "draft", tmp_path / "file")
    new.end()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_writer_that_is_late_to_begin_takes_nothing_back(tmp_path, monkeypatch):
    """It has looked at the folders, stands still, and then renames what it saw."""
    late, rename = EpochDrafts(tmp_path), os.rename
    writer(tmp_path, 0)

    def stands_still(old, new):
        monkeypatch.setattr(os, "rename", rename)
        writer(tmp_path, 2)
        rename(old, new)

    monkeypatch.setattr(os, "rename", stands_still)
    with pytest.raises(FileNotFoundError, match="a later epoch has begun"):
        late.begin(1)
    assert (tmp_path / ".epoch-2" / "2").is_dir()


def test_a_writer_that_is_late_to_begin_removes_no_later_drafts(tmp_path, monkeypatch):
    """It has seen an empty folder, stands still, and then makes its own folder."""
    late, mkdir = EpochDrafts(tmp_path), Path.mkdir

    def stands_still(path, *words, **named):
        monkeypatch.setattr(Path, "mkdir", mkdir)
        (writer(tmp_path, 2).path / "draft").write_text("new")
        mkdir(path, *words, **named)

    monkeypatch.setattr(Path, "mkdir", stands_still)
    with pytest.raises(FileNotFoundError, match="a later epoch has begun"):
        late.begin(1)
    assert (tmp_path / ".epoch-2" / "2" / "draft").read_text() == "new"
    assert left_in(tmp_path) == [tmp_path / ".epoch-2"]


def test_an_epoch_may_begin_twice(tmp_path):
    """After a failure without a death."""
    (writer(tmp_path, 3).path / "draft").touch()
    assert [*writer(tmp_path, 3).path.iterdir()] == []


@pytest.fixture
def fenced(tmp_path):
    """A folder of checkpoints as a fenced rank has it, and as the survivors have it."""
    old, new = CheckpointFolder(tmp_path / "c"), CheckpointFolder(tmp_path / "c")
    old.begin_epoch(0)
    publish(old, 10)
    old.draft(20)
    new.begin_epoch(1)
    publish(new, 20)
    return old, new


def publish(folder: CheckpointFolder, step: int) -> None:
    folder.draft(step)
    folder.publish(Manifest(step, {"by": folder.drafts.epoch}, None, 0, [], [], [], []))


def test_a_fenced_rank_publishes_and_removes_no_checkpoint(fenced):
    old, new = fenced
    for late in (
        lambda: publish(old, 20),
        lambda: old.publish(Manifest(20, {}, None, 0, [], [], [], [])),
        lambda: old.mark_best(old.path / "step-00000010"),
        lambda: old.prune(1),
        lambda: old.discard_after(0),
        lambda: old.draft(30),
        lambda: old.begin_epoch(0),
    ):
        with pytest.raises(FileNotFoundError):
            late()
    whole, refused = find(new.path)
    assert [(each.step, each.manifest.identity) for each in whole] == [
        (20, {"by": 1}),
        (10, {"by": 0}),
    ]
    assert refused == [] and new.best is None
    new.prune(1)
    new.drafts.end()
    assert sorted(path.name for path in new.path.iterdir()) == ["step-00000020"]


def test_a_fenced_reporter_replaces_no_file_of_the_run(tmp_path):
    old, new = RunFolder(tmp_path), RunFolder(tmp_path)
    old.begin_epoch(0, writes=True)
    old.trace({"by": "old"})
    old.draft_summary({"by": "old"}, completed=True)
    new.begin_epoch(1, writes=True)
    new.trace({"by": "new"})
    old.trace({"by": "old"})
    old.publish_summary(completed=True)
    assert old.trouble is not None and "trace.json: No such file" in old.trouble
    assert '"new"' in (tmp_path / "trace.json").read_text()
    assert not (tmp_path / "summary.json").exists()
    new.draft_summary({"by": "new"}, completed=True)
    peer = RunFolder(tmp_path)
    peer.begin_epoch(1, writes=False)
    assert len([*tmp_path.glob(f".epoch-1/1/{SUMMARY_DRAFT}")]) == 1
    peer.publish_summary(completed=True)
    new.publish_summary(completed=True)
    assert '"new"' in (tmp_path / "summary.json").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["summary.json", "trace.json"]

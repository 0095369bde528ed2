"""A process that was given up between a write and its rename, and wakes beside the survivors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ecrm.base.epoch_drafts import EpochDrafts
from ecrm.checkpoint.folder import CheckpointFolder, find
from ecrm.checkpoint.manifest import Manifest
from ecrm.run.run_folder import RunFolder
from support.paths import PROGRAMS


def stopped_writer(folder: Path, what: str) -> subprocess.Popen:
    """A writer that stands still before its rename."""
    writer = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "fenced_writer.py"), str(folder), what],
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while Path(f"/proc/{writer.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline and writer.poll() is None
        time.sleep(0.01)
    return writer


def woken(writer: subprocess.Popen) -> str:
    """What came of its rename."""
    os.kill(writer.pid, signal.SIGCONT)
    said, _ = writer.communicate(timeout=30)
    return said.strip()


@pytest.fixture(params=[True, False], ids=["fenced", "twin"])
def fences(request, monkeypatch):
    """The twin's survivors begin no epoch, and lose to the late rename."""
    if not request.param:
        monkeypatch.setattr(EpochDrafts, "begin", lambda *_: None)
    return request.param


def test_a_checkpoint_of_a_fenced_process_gets_no_name(tmp_path, fences):
    writer = stopped_writer(tmp_path, "checkpoint")
    survivors = CheckpointFolder(tmp_path / "checkpoints")
    survivors.begin_epoch(1)
    survivors.draft(40)
    survivors.publish(Manifest(40, {"by": "survivors"}, None, 0, [], [], [], []))
    assert woken(writer) == ("No such file or directory" if fences else "published")
    assert [each.step for each in find(survivors.path)[0]] == ([40] if fences else [40, 20])


def test_a_file_of_the_run_is_not_replaced_by_a_fenced_process(tmp_path, fences):
    writer = stopped_writer(tmp_path, "ranks")
    survivors = RunFolder(tmp_path)
    survivors.begin_epoch(1, writes=fences)
    if not fences:
        survivors = RunFolder(tmp_path)
    survivors.trace({"by": "survivors"})
    assert woken(writer) == ("No such file or directory" if fences else "replaced")
    assert ("survivors" if fences else "fenced") in (tmp_path / "trace.json").read_text()

"""What ranks agree on when one asks all to stop: the simulated cluster with real folders."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from ecrm.base.errors import EcrmError
from ecrm.run.agreed_stop import agree_on_stop
from ecrm.run.run_folder import PROBE_BYTES, RunFolder
from ecrm.testing.simulated_transport import SimulatedCluster

RANKS = 4


@pytest.fixture
def room(monkeypatch):
    """The longest file that fits on each rank's disk; ranks have folders named after them."""
    longest = dict.fromkeys(range(RANKS), 1 << 30)

    def writing(right, size):
        def write(self, content, *more):
            if size(content) > longest[int(self.parent.name)]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return right(self, content, *more)

        return write

    monkeypatch.setattr(Path, "write_text", writing(Path.write_text, len))
    monkeypatch.setattr(Path, "write_bytes", writing(Path.write_bytes, len))
    return longest


def meeting(tmp_path, monkeypatch, signals=(), summary=0):
    """Returns what each rank is told, and which ranks killed themselves.

    Rank 0 reports and has tried to write a summary of the given number of bytes.
    """
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))

    def program(transport):
        folder = RunFolder(tmp_path / str(transport.rank))
        if transport.rank == 0 and summary:
            folder.draft_summary({"text": "x" * summary}, completed=True)
        engine = SimpleNamespace(
            recovery=SimpleNamespace(recovering=contextlib.nullcontext, stopping=True),
            state=SimpleNamespace(transport=transport),
            rank=transport.rank,
            view=SimpleNamespace(reporter=0),
        )
        try:
            return agree_on_stop(
                engine, signal.SIGTERM if transport.rank in signals else None, folder
            )
        except EcrmError as error:
            return str(error)

    return SimulatedCluster(RANKS, 0).run(program).results, killed


def test_one_that_got_a_signal_stops_all(tmp_path, monkeypatch):
    told, killed = meeting(tmp_path, monkeypatch, signals=[2])
    assert set(told.values()) == {signal.SIGTERM} and not killed


def test_a_reporter_whose_disk_is_full_leaves(tmp_path, monkeypatch, room):
    room[0] = PROBE_BYTES
    told, killed = meeting(tmp_path, monkeypatch, summary=20_000)
    assert set(told.values()) == {None} and killed == [signal.SIGKILL]


def test_a_disk_with_room_for_less_than_the_summary_is_full_for_all(tmp_path, monkeypatch, room):
    """Else one reporter after the other would leave, until too many had."""
    room.update(dict.fromkeys(range(RANKS), 2 * PROBE_BYTES))
    told, killed = meeting(tmp_path, monkeypatch, summary=20_000)
    assert not killed
    (said,) = set(told.values())
    assert (
        said == f"no rank can write into the run folder, so the run ends: cannot write "
        f"{tmp_path}/0/summary.json: No space left on device"
    )

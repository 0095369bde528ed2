"""The head of a run: its process, its place, and its end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ecrm.base.errors import EcrmError
from ecrm.launch.run_head import run_head
from ecrm.process.remote_agent import BEATS_TO
from ecrm.run import run_rank
from ecrm.transport.membership import Member, Phase
from ecrm.transport.membership_socket import LINKS, MemberSocket, Rendezvous


def test_a_head_takes_members_and_is_gone_afterwards() -> None:
    with run_head(["h1"], "127.0.0.1", 2.0) as variables:
        rendezvous = Rendezvous.of_text(variables[LINKS])
        member = Member(0, ["127.0.0.1", 1])
        turns = MemberSocket(
            member, rendezvous.run, rendezvous.secret, "127.0.0.1", rendezvous.head
        )
        deadline = time.monotonic() + 10
        while member.phase is Phase.JOINING:
            assert time.monotonic() < deadline
            turns.turn(None, 0.05)
        (head,) = heads()
        words = Path(f"/proc/{head}/cmdline").read_bytes()
        assert rendezvous.secret.hex().encode() not in words, "out of sight of other users"
        turns.close()
    assert heads() == []


def heads() -> list[int]:
    """The children of this process that are heads."""
    found = Path("/proc/self/task")
    pids = [pid for task in found.iterdir() for pid in (task / "children").read_text().split()]
    return [int(pid) for pid in pids if b"run_head" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_head_that_cannot_listen_is_told_with_its_reason() -> None:
    with pytest.raises(
        EcrmError,
        match=r"the head of the run cannot start: cannot listen on 198\.18\.0\.1: Cannot assign",
    ):
        with run_head(["h1"], "198.18.0.1", 2.0):
            raise AssertionError("started")


def test_a_head_that_says_nothing_is_waited_for_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecrm.launch.run_head.START_SECONDS", 0.0)
    with pytest.raises(EcrmError, match="the head of the run cannot start: no answer in time: lau"):
        with run_head(["h1"], "127.0.0.1", 2.0):
            raise AssertionError("started")
    assert heads() == []


def test_processes_started_by_a_rank_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank takes the rendezvous out of its environment."""
    monkeypatch.setenv(LINKS, Rendezvous(bytes(16), b"secret", ("10.0.0.1", 7), 2.0).text())
    monkeypatch.setenv("PMIX_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "5")
    monkeypatch.setenv(BEATS_TO, "10.0.0.2:8")
    monkeypatch.setattr(
        "ecrm.transport.links.LinkTransport", lambda *words, beats_to: (*words, beats_to)
    )
    joined = (3, 5, Rendezvous(bytes(16), b"secret", ("10.0.0.1", 7), 2.0), ("10.0.0.2", 8))
    assert run_rank._transport() == joined
    assert LINKS not in os.environ and BEATS_TO not in os.environ


def test_a_head_that_dies_at_its_start_or_later_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with run_head(["h1"], "127.0.0.1", 2.0):
        (head,) = heads()
        os.kill(head, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while "died" not in (said := capfd.readouterr().err):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert said == "ecrm: the head of the run died of signal 9: every rank ends\n"
    monkeypatch.setattr("ecrm.launch.run_head.sys.executable", "false")
    with pytest.raises(EcrmError, match="the head of the run cannot start: it ended with 1"):
        with run_head(["h1"], "127.0.0.1", 2.0):
            raise AssertionError("started")

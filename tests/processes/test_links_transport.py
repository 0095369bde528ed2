"""The transport over links, with ranks that are threads of one process."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ecrm.base.errors import EcrmError, UsageError
from ecrm.transport import links
from ecrm.transport.base import PeerFailure
from ecrm.transport.links import MANY_SILENT, LinkTransport
from ecrm.transport.membership import REPEAT_SECONDS, Admit, Head
from ecrm.transport.membership_socket import HeadServer, Rendezvous

SECONDS = 20.0


@pytest.fixture
def keep_alive() -> float:
    return 2.0


@pytest.fixture
def rendezvous(keep_alive: float) -> Iterator[Rendezvous]:
    run, secret = secrets.token_bytes(16), secrets.token_bytes(32)
    server = HeadServer(Head(["h1", "h1"], keep_alive), run, secret, "127.0.0.1", print)
    yield Rendezvous(run, secret, server.place, keep_alive)
    server.close()


def on_two_ranks(rendezvous: Rendezvous, *works: Callable[[LinkTransport], object]) -> list:
    """Run a work per rank, and close both transports; returns results, or errors."""

    def rank(number: int) -> object:
        transport = LinkTransport(number, 2, rendezvous)
        try:
            return works[number](transport)
        except RuntimeError as error:
            return error
        finally:
            transport.close()

    with ThreadPoolExecutor(2) as pool:
        return [job.result(SECONDS) for job in [pool.submit(rank, 0), pool.submit(rank, 1)]]


def test_the_rendezvous_travels_as_text(rendezvous: Rendezvous) -> None:
    assert Rendezvous.of_text(rendezvous.text()) == rendezvous
    assert rendezvous.own_address() == "127.0.0.1"


def test_ranks_in_different_calls_are_told_apart_on_links(rendezvous: Rendezvous) -> None:
    def exchanges(transport: LinkTransport) -> object:
        return transport.exchange({})

    def shares(transport: LinkTransport) -> object:
        return transport.share([])

    first, second = on_two_ranks(rendezvous, exchanges, shares)
    assert str(first) == "rank 1 is in its call 1 (share), rank 0 in its call 1 (exchange)"
    assert str(second) == "rank 0 is in its call 1 (exchange), rank 1 in its call 1 (share)"


def test_a_rank_that_died_before_it_joined_costs_the_others_an_epoch() -> None:
    head, run, secret = Head(["h1", "h1"], 2.0), secrets.token_bytes(16), secrets.token_bytes(32)
    server = HeadServer(head, run, secret, "127.0.0.1", print)
    server.died([1])
    transport = LinkTransport(0, 2, Rendezvous(run, secret, server.place, 2.0))
    assert transport.live == (0, 1)
    with pytest.raises(PeerFailure):
        transport.agree(True)
    transport.shrink()
    assert transport.live == (0,) and list(transport.share([torch.ones(1)])) == [0]
    transport.close()
    server.close()


def test_a_stranger_at_a_rank_is_told_of_once(
    rendezvous: Rendezvous, capfd: pytest.CaptureFixture
) -> None:
    def visited(transport: LinkTransport) -> object:
        place = transport._member.places[1]
        for _ in range(5):
            with socket.create_connection(tuple(place)) as stranger:
                stranger.sendall(bytes(72))  # as long as a greeting
                assert stranger.recv(10) == b""
        return transport.agree(True)

    def agrees(transport: LinkTransport) -> object:
        came = transport.agree(True)
        deadline = time.monotonic() + SECONDS
        while not transport._told_refused:  # the look is not at every wait
            assert time.monotonic() < deadline
            transport._look()
        time.sleep(2 * REPEAT_SECONDS)
        transport._look()
        return came, transport.figures().refused

    assert on_two_ranks(rendezvous, visited, agrees) == [True, (True, 5)]
    said = capfd.readouterr().err
    assert said == "ecrm: rank 1: 127.0.0.1 is no member of this run: refused (told once)\n"


def test_many_connections_without_a_word_are_told_of_once(
    rendezvous: Rendezvous, capfd: pytest.CaptureFixture
) -> None:
    def visited(transport: LinkTransport) -> object:
        place = transport._member.places[1]
        for number in range(2 * MANY_SILENT):
            with socket.create_connection(tuple(place)) as stranger:
                stranger.sendall(bytes(number % 2))  # nothing, or less than a greeting
        return transport.agree(True)

    def agrees(transport: LinkTransport) -> object:
        came = transport.agree(True)
        deadline = time.monotonic() + SECONDS
        while transport.figures().silent < 2 * MANY_SILENT or not transport._told_silent:
            assert time.monotonic() < deadline
            transport._look()
        time.sleep(2 * REPEAT_SECONDS)
        transport._look()
        return came

    assert on_two_ranks(rendezvous, visited, agrees) == [True, True]
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("ecrm: rank 1: ")
    count = int(said.split()[3])
    assert MANY_SILENT <= count <= 2 * MANY_SILENT
    assert said.endswith(
        f"{count} connections said nothing, the last of 127.0.0.1: closed (told once)"
    )


@pytest.mark.parametrize("keep_alive", [20.0])  # long: a rank given up would end this process
@pytest.mark.parametrize("call", [lambda links: links.agree(True), lambda links: links.share([])])
def test_a_call_that_ends_takes_a_report_back_at_once(
    call: Callable[[LinkTransport], object],
    rendezvous: Rendezvous,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program computes next, and looks no more: the report must not count meanwhile."""
    reports, heads = [], Head.hear

    def hear(head: Head, now: float, message: dict) -> None:
        if message.get("is") == "unheard" and message["rank"] == 0:
            reports.append(message["peers"])
        heads(head, now, message)

    monkeypatch.setattr(Head, "hear", hear)

    def waits(transport: LinkTransport) -> object:
        carrier, came = transport._carrier, threading.Event()
        receive = carrier.receive

        def receives(rank: int, seconds: float) -> object:
            if (message := receive(rank, seconds)) is not None:
                came.set()
            return message

        monkeypatch.setattr(carrier, "receive", receives)
        monkeypatch.setattr(carrier, "down", lambda rank: 0.0 if came.is_set() else SECONDS)
        call(transport)
        time.sleep(0.3)
        said = list(reports)
        call(transport)
        return said

    def computes(transport: LinkTransport) -> object:
        time.sleep(0.6)
        call(transport)
        call(transport)

    said, _ = on_two_ranks(rendezvous, waits, computes)
    assert said[0] == [1] and said[-1] == []


def test_the_window_fills_and_empties_again(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages below the size of lent ones, more than fit, while the other rank does other work."""
    monkeypatch.setattr(links, "LENT_BYTES", 1 << 30)
    numbers = torch.arange(1 << 20)

    def sends(transport: LinkTransport) -> object:
        for _ in range(4):
            (came,) = transport.exchange({0: [numbers], 1: [numbers]})[1 - transport.rank]
            assert torch.equal(came, numbers)
        return transport.figures().kept_bytes <= 16 << 20

    assert on_two_ranks(rendezvous, sends, sends) == [True, True]


def test_the_last_message_arrives_although_its_link_is_away_for_a_while(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No acknowledgement comes for longer than the half of the time for a leave."""
    monkeypatch.setattr(links, "CLOSE_SECONDS", 0.4)
    told_left: list[float] = []

    def closes(transport: LinkTransport) -> object:
        acked, begun = transport._carrier.all_acked, time.monotonic()
        leave = transport._member.leave
        monkeypatch.setattr(
            transport._carrier,
            "all_acked",
            lambda *words: acked(*words) and time.monotonic() > begun + 0.6,
        )
        monkeypatch.setattr(
            transport._member,
            "leave",
            lambda: (told_left.append(time.monotonic() - begun), leave()),
        )
        return transport.agree(True)

    def agrees(transport: LinkTransport) -> object:
        return transport.agree(True)

    assert on_two_ranks(rendezvous, closes, agrees) == [True, True]
    assert 0.6 < told_left[0] < 1.8


@pytest.mark.parametrize("lent_bytes", [1 << 16, 1 << 30])
def test_a_rank_that_has_left_takes_no_message_any_more(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch, lent_bytes: int
) -> None:
    """A window stays full, and memory stays lent: both are failures, not waits without end."""
    monkeypatch.setattr(links, "LENT_BYTES", lent_bytes)
    monkeypatch.setattr(links, "CLOSE_SECONDS", 0.2)
    big = np.zeros(12 << 20, np.uint8)

    def leaves(transport: LinkTransport) -> object:
        return None

    def sends(transport: LinkTransport) -> object:
        deadline = time.monotonic() + SECONDS
        while not transport._member.left:
            assert time.monotonic() < deadline
            transport._look()
        time.sleep(0.5)  # the connection is closed
        with pytest.raises(PeerFailure, match=r"rank 1 has left|ranks \[1\] have left"):
            transport._send(1, big)
            transport._send(1, big)
            transport._flush()
        return "failed"

    assert on_two_ranks(rendezvous, sends, leaves) == ["failed", None]


def test_the_limit_of_open_files_is_raised_as_far_as_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits, set_to = (100, 500), []
    monkeypatch.setattr(links.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(links.resource, "setrlimit", lambda _, both: set_to.append(both))
    links._allow_files(50, 90)
    links._allow_files(90, 400)
    links._allow_files(400, 900)
    assert set_to == [(400, 500), (500, 500)]
    with pytest.raises(UsageError, match=r"needs 564 open files .* allows 500: raise the hard"):
        LinkTransport(0, 500, Rendezvous(bytes(16), b"secret", ("127.0.0.1", 7), 2.0))


def test_a_rank_that_is_alone_with_the_head_says_where_the_head_is(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "JOIN_SECONDS", 0.2)
    address, port = rendezvous.head
    with pytest.raises(
        EcrmError,
        match=f"rank 0: not all ranks have joined within 0 s; the head is {address}:{port}",
    ):
        LinkTransport(0, 2, rendezvous)


def test_a_rank_that_was_lost_joins_again_and_again(rendezvous: Rendezvous) -> None:
    lives, short = 3, 0.5
    server = HeadServer(
        Head(["h1", "h1"], short), rendezvous.run, rendezvous.secret, "127.0.0.1", print
    )
    here = Rendezvous(rendezvous.run, rendezvous.secret, server.place, short)

    def stays() -> object:
        transport, seen, sums, deadline = LinkTransport(0, 2, here), [], [], time.monotonic() + 30
        while len(sums) < lives or len(transport.live) == 2:
            assert time.monotonic() < deadline
            try:
                came = transport.exchange({rank: [torch.ones(3)] for rank in transport.live})
                if len(came) == 2 and len(sums) < seen.count((0, 1)) + 1:
                    sums.append(float(came[1][0].sum()))
                transport.agree(True)
                if transport.newcomers_wait:
                    transport.shrink(Admit.ASKS)
                    seen.append(transport.live)
            except PeerFailure:
                transport.shrink()
                seen.append(transport.live)
        transport.close()
        return seen, sums

    def comes_and_goes() -> object:
        for life in range(lives):
            transport = LinkTransport(
                1, 2, here, life=f"life {life}" if life else "", host="h1" if life else ""
            )
            assert transport.joined == bool(life)
            if life:
                transport.enter()
            assert transport.live == (0, 1)
            for _ in range(3):
                transport.exchange({0: [torch.full((3,), 1.0 + life)]})
                transport.agree(True)
            transport._carrier.end_lease()  # as a death, but for the process
            transport._carrier.close()
            transport._socket.close()
            server.died([1])
        return None

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(stays), pool.submit(comes_and_goes)]
        (seen, sums), _ = (job.result(40) for job in jobs)
    server.close()
    assert seen == [(0,), (0, 1)] * (lives - 1) + [(0,)]
    assert sums == [3.0, 6.0, 9.0]


def test_a_newcomer_that_hears_nothing_of_the_head_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "ENTER_SECONDS", 0.3)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind(("127.0.0.1", 0))
        there = Rendezvous(b"r" * 16, b"s" * 32, nobody.getsockname(), 0.2)
        newcomer = LinkTransport(1, 2, there, life="a", host="h1")
        with pytest.raises(EcrmError, match="rank 1 cannot join the run: the head .* not answer"):
            newcomer.enter()
        newcomer._carrier.close()
        newcomer._socket.close()


def test_a_newcomer_that_no_epoch_will_ever_have_ends_in_words(rendezvous: Rendezvous) -> None:
    newcomer = LinkTransport(1, 2, rendezvous, life="a", host="h1")
    newcomer.why_closed = lambda: "a second session has begun"
    with pytest.raises(EcrmError, match="rank 1 cannot join the run: a second session has begun"):
        newcomer.enter()
    newcomer._carrier.close()
    newcomer._socket.close()


def test_a_wish_to_stop_that_goes_over_the_head_is_a_signal_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(links.os, "kill", lambda *words: killed.append(words))
    head = Head(["h1"], 2.0)
    server = HeadServer(head, b"r" * 16, b"s" * 32, "127.0.0.1", print)
    transport = LinkTransport(0, 1, Rendezvous(b"r" * 16, b"s" * 32, server.place, 2.0))
    try:
        for stop, expected in ((9, []), (signal.SIGTERM, [(os.getpid(), signal.SIGTERM)])):
            head.stop = stop  # 9: only the signals that ask are taken
            end = time.monotonic() + 0.7
            while time.monotonic() < end:
                transport.agree(True)
                transport._look()
                time.sleep(0.01)
            assert killed == expected
    finally:
        transport.close()
        server.close()

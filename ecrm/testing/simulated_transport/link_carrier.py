"""A carrier over simulated connections: the real links of one rank, in virtual time."""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

import numpy as np

from ecrm.kernels.links import UP, Identity, Settings, Step
from ecrm.testing.simulated_transport.network import Connection, Network
from ecrm.transport.carrier import Carrier, Figures

DIALLING = 1
LEASE_SHARE, BEAT_SHARE, LONGEST_BEAT = 0.8, 0.05, 0.5
"""Shares of the keep-alive time, as `kLeaseShare` and `kBeatShare` of kernels/links/carrier.h."""
LOOK_FACTOR = 20.0
"""By how much waits are longer than asked for: fewer looks, as on a busy machine."""
MOST_WRITTEN = 1 << 14
"""Bytes of one write."""


class Process(Protocol):
    """What a carrier needs of its process."""

    host: int
    rank: int

    def wait(self, seconds: float, done: Callable[[], bool]) -> None: ...
    def touch(self) -> None: ...
    def begins(self, epoch: int, live: Collection[int]) -> None: ...
    def beat(self, number: int, begun: bool) -> None: ...
    def lease_is_over(self) -> None: ...


class SimulatedCarrier(Carrier):
    """As `Carrier`; progress comes with the events of the network, as from the carrier's thread."""

    def __init__(
        self,
        network: Network,
        process: Process,
        me: Identity,
        world: int,
        settings: Settings,
        address: str,
    ) -> None:
        self._network, self._process, self._clock = network, process, network.clock
        settings.window = network.faults.window
        self._me, self._settings, self.host = me, settings, process.host
        self._links: dict[int, Any] = {
            peer: network.kind.Link(me, peer, settings) for peer in range(world) if peer != me.rank
        }
        self._came: dict[int, deque[bytes]] = {peer: deque() for peer in self._links}
        self._places: dict[int, tuple[str, int]] = {}
        self._live: set[int] = set()
        self._unsaid: set[int] = set()
        self._connections: dict[int, tuple[Connection, int]] = {}
        self._peers: dict[Connection, int] = {}
        self._strangers: dict[Connection, Any] = {}
        self._timers = dict.fromkeys(self._links, math.inf)
        self._closed = False
        self._patience, self._pause, self._begun = math.inf, 0.0, False
        self._lease, self._has_answer = 0, False
        self._answered, self._sent, self._number = 0.0, dict[int, float](), 0
        self.refused = self._told_news = 0
        self.address, self.port = address, network.listen(address, self)

    # As `Carrier`.

    def peer(self, rank: int, address: str, port: int) -> None:
        self._places[rank] = address, port

    def begin_epoch(self, epoch: int, live: Collection[int]) -> None:
        self._process.begins(epoch, live)
        before, self._live = self._live, set(live) - {self._me.rank}
        for peer, link in self._links.items():
            self._came[peer].clear()
            stays = peer in before and peer in self._live
            if not link.begin_epoch(self._clock.now, epoch, stays):
                self._hang_up(peer)
        self._unsaid.clear()
        for peer in sorted(self._live):
            self._serve(peer)

    def lease(self, address: str, port: int, keep_alive: float, last: int = 0) -> None:
        self._number = last
        self._begin_lease(keep_alive)

    def begin_lease(self, keep_alive: float) -> None:
        self._begun = True
        self._begin_lease(keep_alive)

    def leased(self) -> bool:
        return self._begun and self._has_answer

    def _begin_lease(self, keep_alive: float) -> None:
        self._patience, self._answered = LEASE_SHARE * keep_alive, self._clock.now
        self._pause = min(BEAT_SHARE * keep_alive, LONGEST_BEAT)
        self._sent.clear()
        self._has_answer, self._lease = False, self._lease + 1
        self._beat(self._lease)

    def news(self) -> int:
        return self._told_news

    def end_lease(self) -> None:
        self._patience = math.inf

    def watch(self, connection: Any) -> None:
        """Waits of a process return for a datagram in any case."""

    def send(self, rank: int, memory: np.ndarray, lend: bool) -> bool:
        if lend:
            lent = (ctypes.c_char * memory.nbytes).from_address(memory.ctypes.data)
            number = self._links[rank].lend(lent)
        else:
            number = self._links[rank].send(memory.tobytes())
        self._serve(rank)
        return bool(number)

    def receive(self, rank: int, seconds: float) -> np.ndarray | None:
        link, came = self._links[rank], self._came[rank]

        def done() -> bool:
            while (message := link.take()) is not None:
                came.append(message)
            return bool(came)

        self._process.wait(LOOK_FACTOR * seconds, done)
        return np.frombuffer(bytearray(came.popleft()), np.uint8) if came else None

    def flush(self, seconds: float, away: Collection[int] = ()) -> bool:
        def done() -> bool:
            return not any(
                self._links[peer].lent or (peer in self._connections and self._is_behind(peer))
                for peer in self._live.difference(away)
            )

        self._process.wait(LOOK_FACTOR * seconds, done)
        return done()

    def all_acked(self, seconds: float, away: Collection[int] = ()) -> bool:
        def done() -> bool:
            links = [self._links[peer] for peer in self._live.difference(away)]
            return all(link.acked == link.sent for link in links)

        self._process.wait(LOOK_FACTOR * seconds, done)
        return done()

    def acknowledge_all(self) -> None:
        for peer in sorted(self._unsaid):
            self._links[peer].acknowledge_all()
            self._serve(peer)
        self._unsaid.clear()

    def down(self, rank: int) -> float:
        return float(self._links[rank].down(self._clock.now))

    def cut(self, rank: int) -> bool:
        there = self._connections.get(rank)
        if there is not None:
            there[0].reset()
        return there is not None

    def figures(self) -> Figures:
        links = self._links.values()
        losses, resent = (sum(getattr(each, what) for each in links) for what in FIGURES)
        kept = sum(link.kept_bytes for link in links)
        return Figures(losses, resent, self.refused, 0, kept, "0.0.0.0", "0.0.0.0")

    def close(self) -> None:
        """Close all connections, as the system does for a process that ends."""
        self.end(lambda connection, side: connection.close(side))

    # Of the process and of the network.

    def end(self, how: Callable[[Connection, int], None]) -> None:
        """Nothing happens on this carrier any more."""
        if self._closed:
            return
        self._closed = True
        self._network.listeners.pop((self.address, self.port), None)
        for connection, side in [*self._connections.values(), *((c, 1) for c in self._strangers)]:
            how(connection, side)
        self._patience = math.inf

    def connections_to(self, host: int) -> list[Connection]:
        """The connections to ranks of a host."""
        ends = [(each, each.ends[1 - side]) for each, side in self._connections.values()]
        return [each for each, end in ends if end is not None and end.host == host]

    def heard(self, number: int, news: int) -> None:
        """The head has answered a beat, with the number of its state."""
        self._told_news = max(self._told_news, news)
        if number in self._sent:
            self._answered = max(self._answered, self._sent[number])
            self._has_answer = True

    def accept(self, connection: Connection) -> None:
        """A connection of a stranger."""
        self._strangers[connection] = self._network.kind.Reception(self._me)
        self._clock.after(self._settings.greet, self._send_away, connection)

    def arrived(self, connection: Connection, side: int, data: bytes) -> None:
        """Bytes have come."""
        if self._closed:
            return
        if connection in self._strangers:
            data = self._greeted(connection, data)
        peer = self._peers.get(connection)
        if peer is None:
            return
        link = self._links[peer]
        if data and not link.came(self._clock.now, data):
            self._lost(peer)
        self._unsaid.add(peer)
        self._serve(peer)
        self._process.touch()

    def ended(self, connection: Connection, side: int) -> None:
        """The other side has closed the connection, or the connection is reset."""
        self._strangers.pop(connection, None)
        peer = self._peers.get(connection)
        if peer is not None and not self._closed:
            self._lost(peer)
            self._serve(peer)
            self._process.touch()

    def writes(self, connection: Connection, side: int) -> None:
        """Bytes have left the connection: there is room again."""
        peer = self._peers.get(connection)
        if peer is not None and not self._closed:
            self._serve(peer)

    def _greeted(self, connection: Connection, data: bytes) -> bytes:
        """Take the bytes of a greeting; return the bytes behind the greeting."""
        reception = self._strangers[connection]
        while data:
            some, data = data[: reception.wanted], data[reception.wanted :]
            step = reception.came(some)
            if step == Step.MORE:
                continue
            self.refused += step == Step.REFUSED
            peer = reception.sender
            link = self._links.get(peer)
            if (
                step == Step.REFUSED
                or link is None
                or peer not in self._live
                or reception.epoch != link.epoch
            ):
                self._send_away(connection)
                return b""
            if step == Step.ASKS:
                nonce = self._network.random.randbytes(16)
                answer = reception.answer(link.epoch, link.expected, link.partial, nonce)
                connection.write(1, answer)
                continue
            del self._strangers[connection]
            self._hang_up(peer)
            self._connections[peer], self._peers[connection] = (connection, 1), peer
            if not link.adopt(self._clock.now, reception.expected, reception.partial):
                self._lost(peer)
            break
        return data

    def _send_away(self, connection: Connection) -> None:
        if self._strangers.pop(connection, None) is not None:
            connection.close(1)

    def _hang_up(self, peer: int) -> None:
        connection, side = self._connections.pop(peer, (None, 0))
        if connection is not None:
            del self._peers[connection]
            connection.close(side)

    def _lost(self, peer: int) -> None:
        self._hang_up(peer)
        self._links[peer].broke(self._clock.now)

    def _serve(self, peer: int) -> None:
        """Do what a link asks for now, and come back when the link may ask again."""
        link, now = self._links[peer], self._clock.now
        if self._closed or peer not in self._live:
            return
        if not link.tick(now):
            self._lost(peer)
        if link.wants_dial(now):
            link.dialling(now)
            connection = self._network.dial(
                self, self._places[peer], lambda made: self._dialled(peer, made)
            )
            self._connections[peer], self._peers[connection] = (connection, 0), peer
        if peer in self._connections and link.state != DIALLING:
            connection, side = self._connections[peer]
            while (room := connection.room(side)) > 0 and (
                data := link.gather(min(room, MOST_WRITTEN))
            ):
                connection.write(side, data)
                link.wrote(now, len(data))
        soon = max(link.next(), now)
        if soon < self._timers[peer]:
            self._timers[peer] = soon
            self._clock.at(soon, self._timer, peer, soon)

    def _timer(self, peer: int, time: float) -> None:
        if self._timers[peer] == time:
            self._timers[peer] = math.inf
            self._serve(peer)

    def _dialled(self, peer: int, connection: Connection) -> None:
        if self._peers.get(connection) == peer and not self._closed:
            self._links[peer].dialled(self._clock.now, self._network.random.randbytes(16))
            self._serve(peer)

    def _is_behind(self, peer: int) -> bool:
        """Whether bytes of a link wait for room in a connection."""
        connection, side = self._connections[peer]
        return self._links[peer].state == UP and connection.room(side) <= 0

    def _beat(self, lease: int) -> None:
        if self._patience == math.inf or lease != self._lease:
            return
        if self._clock.now > self._answered + self._patience:
            self._process.lease_is_over()
            return
        self._number += 1
        self._sent[self._number] = self._clock.now
        self._process.beat(self._number, self._begun)
        self._clock.after(self._pause, self._beat, lease)


FIGURES = ("losses", "resent")

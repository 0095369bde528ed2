"""Connections and datagrams between simulated hosts, in virtual time, with faults from a seed.

A connection carries bytes in order, late, and in pieces. Connections are slow, or reset at any
byte. A cut between two hosts holds bytes back, one way or both ways. Datagrams are lost, doubled
and late.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from ecrm.testing.simulated_transport.virtual_time import VirtualTime
from ecrm.transport.by_host import LEAST_RANKS

HEAD = -1
"""In the place of a host: the machine of the head."""
RESETS = "resets of connections"
MOST_RESETS = 3
"""Resets of two hosts in half a keep-alive time."""
DATAGRAM_SECONDS = 0.03
"""The longest way of a datagram."""


@dataclass(frozen=True)
class LinkFaults:
    """The behaviour of a network, and the chances of its faults.

    - `keep_alive`: the keep-alive time of the run in seconds.
    - `latency`: the longest way of bytes in seconds.
    - `slow`: chance that a pair of hosts is slow. `rate`: bytes per second of slow pairs.
    - `reset`: chance that a connection is reset, at a byte drawn up to `reset_within`.
    - `loss`, `doubled`: chances of a datagram.
    - `window`: bytes of copied messages without acknowledgement.
    - `lent_bytes`: messages of so many bytes or more are lent.
    - `pause`: seconds between two resets or cuts, on average.
    - `partings`: most cuts for good.
    - `silent`: chance that nobody tells of a rank's death.
    - `computes`: chance that a phase of a program takes time.
    - `least_ranks`: ranks of two hosts from which on their messages are gathered.
    """

    keep_alive: float = 1.0
    latency: float = 0.001
    rate: float = math.inf
    slow: float = 0.0
    reset: float = 0.0
    reset_within: int = 20_000
    loss: float = 0.0
    doubled: float = 0.0
    window: int = 16 << 20
    lent_bytes: int = 1 << 16
    pause: float = math.inf
    partings: int = 0
    silent: float = 0.0
    computes: float = 0.0
    least_ranks: int = LEAST_RANKS

    @staticmethod
    def drawn(random: Random) -> LinkFaults:
        """Draw a network, from calm to violent."""
        return LinkFaults(
            keep_alive=random.choice((1.0, 2.0)),
            latency=random.choice((0.0001, 0.001, 0.01)),
            rate=random.choice((2e5, 1e6)),
            slow=random.choice((0.0, 0.0, 0.3)),
            reset=random.choice((0.0, 0.1, 0.5)),
            reset_within=random.choice((300, 3_000, 30_000)),
            loss=random.choice((0.0, 0.05, 0.1)),
            doubled=random.choice((0.0, 0.1, 0.5)),
            window=random.choice((500, 5_000, 1 << 20)),
            lent_bytes=random.choice((1, 200, 1 << 16)),
            pause=random.choice((0.05, 0.3, 2.0)),
            partings=random.choice((0, 1, 2)),
            silent=random.choice((0.0, 0.3, 1.0)),
            computes=random.choice((0.0, 0.1, 0.5)),
            least_ranks=random.choice((1, 2, LEAST_RANKS)),
        )


class End(Protocol):
    """The owner of one side of a connection."""

    host: int

    def arrived(self, connection: Connection, side: int, data: bytes) -> None: ...
    def ended(self, connection: Connection, side: int) -> None: ...
    def writes(self, connection: Connection, side: int) -> None: ...


class Listener(End, Protocol):
    """An end that accepts connections."""

    def accept(self, connection: Connection) -> None: ...


class Connection:
    """A connection: side 0 has dialled, side 1 has accepted."""

    BUFFER_BYTES = 1 << 16
    """Bytes under way in one direction, as in the buffers of sockets."""

    def __init__(self, network: Network, dialler: End) -> None:
        self._network, self._clock = network, network.clock
        self.ends: list[End | None] = [dialler, None]
        self._pipes: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
        self._last, self._bytes, self._carried = [0.0, 0.0], [0, 0], 0
        self._limit = network.limit()

    def room(self, side: int) -> int:
        """The bytes that a side may write now."""
        return self.BUFFER_BYTES - self._bytes[side]

    def write(self, side: int, data: bytes) -> None:
        """Send bytes to the other side; no bytes at all say that this side has closed."""
        ends, pipe = self.ends, self._pipes[side]
        here, there = ends[side], ends[1 - side]
        if here is None or there is None:
            return
        time = self._network.arrival(here.host, there.host, self._last[side], len(data))
        self._last[side] = time
        self._bytes[side] += len(data)
        pipe.append((time, data))
        self._clock.at(time, self._pump, side, here.host, there.host)

    def close(self, side: int) -> None:
        """A side closes its end; the other side hears of this behind the last bytes."""
        if self.ends[side] is not None:
            self.write(side, b"")
            self.ends[side] = None

    def vanish(self, side: int) -> None:
        """The host of a side is gone, and says nothing."""
        self.ends[side] = None

    def reset(self, late: float = 0.0, first: int = 0, arrives: bool = False) -> None:
        """End both sides, the `first` side now.

        Bytes under way are lost. With `arrives` bytes of the first side arrive late, and then the
        other side ends.
        """
        here, there = self.ends[first], self.ends[1 - first]
        if arrives and here is not None and there is not None:
            self._pipes[first].extend(self._later(first, late))
            self.write(first, b"")
            self._clock.after(late, self._pump, first, here.host, there.host)
        else:
            for pipe in self._pipes:
                pipe.clear()
            self._clock.after(late, self._end, 1 - first)
        self._end(first)

    def _later(self, side: int, late: float) -> list[tuple[float, bytes]]:
        """Take the bytes of a side under way, to arrive later."""
        pieces = [(time + late, data) for time, data in self._pipes[side]]
        self._last[side] += late
        self._pipes[side].clear()
        return pieces

    def _end(self, side: int) -> None:
        end, self.ends[side] = self.ends[side], None
        if end is not None:
            end.ended(self, side)

    def _pump(self, side: int, here: int, there: int) -> None:
        """Deliver what has come."""
        pipe = self._pipes[side]
        while pipe and pipe[0][0] <= self._clock.now:
            until = self._network.cut_until(here, there)
            if until > self._clock.now:
                if until < math.inf:  # the system sends again some time after the cut
                    later = until + self._network.latency()
                    self._clock.at(later, self._pump, side, here, there)
                return
            to = self.ends[1 - side]
            if to is None:
                pipe.clear()
                return
            _, data = pipe.popleft()
            self._bytes[side] -= len(data)
            if not data:
                self._end(1 - side)
                return
            self._deliver(to, side, data)

    def _deliver(self, to: End, side: int, data: bytes) -> None:
        end, limit = self.ends[side], self._limit
        broken = (
            limit is not None
            and end is not None
            and self._carried + len(data) >= limit
            and self._network.may_reset(end.host, to.host)
        )
        how = self._network.late_end() if broken else (0.0, 0, False)
        if broken and limit is not None and not how[2]:
            data = data[: max(limit - self._carried, 0)]
        self._carried += len(data)
        if data:
            to.arrived(self, 1 - side, data)
        if broken:
            self._limit = None
            self.reset(*how)
        elif self.ends[side] is end and end is not None:
            end.writes(self, side)


class Network:
    """All connections, listeners and cuts. `kind` has the links: `ecrm.kernels.links`."""

    def __init__(self, clock: VirtualTime, random: Random, faults: LinkFaults, kind: Any) -> None:
        self.clock, self.random, self.faults, self.kind = clock, random, faults, kind
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.mix: Counter[str] = Counter()
        self._cuts: dict[tuple[int, int], float] = {}
        self._rates: dict[tuple[int, int], float] = {}
        self._resets: dict[tuple[int, int], deque[float]] = {}
        self._ports = 0
        self.calm_until = 0.0
        """The time until which no connection is reset."""

    def listen(self, address: str, listener: Listener) -> int:
        """The port of a new listener."""
        self._ports += 1
        self.listeners[address, self._ports] = listener
        return self._ports

    def latency(self) -> float:
        """The seconds of one way."""
        return self.faults.latency * self.random.uniform(0.1, 1.0)

    def limit(self) -> int | None:
        """The byte at which a new connection is reset, if any."""
        if self.random.random() >= self.faults.reset:
            return None
        return self.random.randrange(1, self.faults.reset_within)

    def may_reset(self, here: int, there: int) -> bool:
        """Whether a reset between two hosts happens now.

        Resets without an end would be a cut: at most 3 happen in half a keep-alive time, and none
        right after a cut.
        """
        if self.clock.now < self.calm_until:
            return False
        times = self._resets.setdefault((min(here, there), max(here, there)), deque())
        while times and times[0] < self.clock.now - self.faults.keep_alive / 2:
            times.popleft()
        if len(times) >= MOST_RESETS:
            return False
        times.append(self.clock.now)
        self.mix[RESETS] += 1
        return True

    def late_end(self) -> tuple[float, int, bool]:
        """The arguments of a reset, drawn."""
        late = self.random.choice((0.0, 10 * self.latency()))
        return late, self.random.randrange(2), self.random.random() < 0.3

    def arrival(self, here: int, there: int, after: float, size: int) -> float:
        """The time at which bytes arrive that are written now, behind the bytes before."""
        pair = min(here, there), max(here, there)
        if pair not in self._rates:
            slow = here != there and self.random.random() < self.faults.slow
            self._rates[pair] = self.faults.rate if slow else math.inf
        return max(after, self.clock.now + self.latency()) + size / self._rates[pair]

    def cut(self, here: int, there: int, until: float) -> None:
        """Hold back all bytes from a host to a host until a time."""
        self._cuts[here, there] = until

    def cut_until(self, here: int, there: int) -> float:
        """The end of the cut from a host to a host; a past time without a cut."""
        return self._cuts.get((here, there), -math.inf)

    def is_cut(self, here: int, there: int) -> bool:
        """Whether nothing comes from a host to a host."""
        return self.cut_until(here, there) > self.clock.now

    def dial(
        self, dialler: End, place: tuple[str, int], made: Callable[[Connection], None]
    ) -> Connection:
        """Begin a connection; `made` is called at its dialler once the connection is there."""
        connection = Connection(self, dialler)
        self.clock.after(self.latency(), self._asked, connection, place, made)
        return connection

    def _asked(
        self,
        connection: Connection,
        place: tuple[str, int],
        made: Callable[[Connection], None],
    ) -> None:
        dialler, listener = connection.ends[0], self.listeners.get(place)
        if dialler is None:
            return
        if listener is None:
            connection.reset()
        elif not self.is_cut(dialler.host, listener.host) and not self.is_cut(
            listener.host, dialler.host
        ):  # over a cut link nobody answers
            connection.ends[1] = listener
            listener.accept(connection)
            self.clock.after(self.latency(), self._made, connection, made)

    def _made(self, connection: Connection, made: Callable[[Connection], None]) -> None:
        if connection.ends[0] is not None:
            made(connection)

    def datagram(self, here: int, there: int, act: Callable[..., object], *arguments: Any) -> None:
        """Call `act` when a datagram arrives: perhaps never, perhaps twice, always late."""
        for _ in range(1 + (self.random.random() < self.faults.doubled)):
            if not self.is_cut(here, there) and self.random.random() >= self.faults.loss:
                self.clock.after(self.random.random() * DATAGRAM_SECONDS, act, *arguments)

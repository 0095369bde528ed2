"""Two ends of a link in one process, with a network and a clock that the test moves.

A connection carries bytes both ways with a delay, in chunks. The network can be cut one way or both
ways, and a connection can be reset after any number of bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ecrm.kernels import links
from ecrm.kernels.links import UP, Identity, Settings, Step, reference

KINDS: dict[str, Any] = {"cpu": links, "reference": reference}
RUN, SECRET = b"run of the tests", b"secret of the run"


class Connection:
    """A connection from end 0 to end 1; `pipes[end]` has what this end has written."""

    def __init__(self, reception: Any, number: int) -> None:
        self.pipes: tuple[deque, deque] = (deque(), deque())
        self.open = [True, True]
        self.reception, self.number = reception, number
        self.stuck: set[int] = set()
        """Ends whose bytes do not arrive any more."""


class LinkNetwork:
    """The two ends, `ends[rank]`, and all connections between the two ends."""

    def __init__(
        self,
        kind: str,
        settings: Settings | None = None,
        delay: Callable[[int], float] = lambda end: 0.0,
        chunk: Callable[[], int] = lambda: 1 << 20,
    ) -> None:
        self.kind, self.settings = KINDS[kind], settings or Settings()
        self.ends = [
            self.kind.Link(Identity(RUN, SECRET, rank), 1 - rank, self.settings) for rank in (0, 1)
        ]
        self.delay, self.chunk = delay, chunk
        self.now = 0.0
        self.cut: set[int] = set()
        """Ends whose bytes do not arrive."""
        self.reset_at: Callable[[int], int | None] = lambda connection: None
        """Bytes after which a connection of this number is reset."""
        self.longest: int | None = None
        """The longest piece that arrives; behind a longer piece a connection brings nothing."""
        self.carried = 0
        self.connections = 0
        self.trace: list[tuple[int, bytes]] = []
        self._carried_now: dict[int, int] = {}
        self._current: list[Connection | None] = [None, None]
        self._accepted: list[Connection] = []
        for end in self.ends:
            end.begin_epoch(0.0, 1)

    def run(self, until: Callable[[], object], seconds: float = 60.0) -> None:
        """Let things happen `until` true; asserts that this takes at most so many seconds."""
        end = self.now + seconds
        while not until():
            if not self._turn():
                self.now = max(self.now, min(self._next(), end))
                assert self.now < end, f"not within {seconds} s"

    def pass_time(self, seconds: float) -> None:
        """Let so many seconds pass."""
        end = self.now + seconds
        while self.now < end:
            if not self._turn():
                self.now = min(max(self.now, self._next()), end)

    def turns(self, count: int) -> None:
        """Let so many turns happen. In a turn each end writes a chunk, perhaps half a message."""
        for _ in range(count):
            self._turn()

    def up(self) -> bool:
        """Whether both ends have a connection."""
        return all(end.state == UP for end in self.ends)

    def reset(self) -> None:
        """Reset all connections: both ends see it at once."""
        for connection in {self._current[0], *self._accepted} - {None}:
            self._kill(connection)

    def begin_epoch(self, rank: int, epoch: int, keeps: bool = False) -> bool:
        """An end begins an epoch; returns whether its connection stays."""
        kept = keeps and self.ends[rank].begin_epoch(self.now, epoch, keeps)
        if not kept:
            self._close(rank)
            self.ends[rank].begin_epoch(self.now, epoch)
        return kept

    def _next(self) -> float:
        times = [end.next() for end in self.ends]
        for connection in {self._current[0], *self._accepted} - {None}:
            for end, pipe in enumerate(connection.pipes):
                if pipe and end not in self.cut and connection.open[1 - end]:
                    times.append(pipe[0][0])
        return min(times)

    def _turn(self) -> bool:
        """Do all that can be done now; return whether anything was."""
        done = False
        first = self.ends[0]
        if first.wants_dial(self.now):
            done = True
            first.dialling(self.now)
            if not self.cut:
                self.connections += 1
                connection = Connection(
                    self.kind.Reception(Identity(RUN, SECRET, 1)), self.connections
                )
                self._current[0] = connection
                self._accepted.append(connection)
                first.dialled(self.now, self.connections.to_bytes(16, "big"))
        for rank, end in enumerate(self.ends):
            if not end.tick(self.now):
                self._close(rank)
                done = True
        for rank, end in enumerate(self.ends):
            connection = self._current[rank]
            if connection is not None and (data := end.gather(self.chunk())):
                self._write(connection, rank, data)
                end.wrote(self.now, len(data))
                done = True
        for connection in list(self._accepted):
            for end in (0, 1):
                done |= self._deliver(connection, end)
        self._accepted = [each for each in self._accepted if any(each.open)]
        return done

    def _write(self, connection: Connection, end: int, data: bytes) -> None:
        self.trace.append((end, data))
        if self.longest is not None and len(data) > self.longest:
            connection.stuck.add(end)
        if end in connection.stuck:
            return
        connection.pipes[end].append((self.now + self.delay(end), data))

    def _deliver(self, connection: Connection, end: int) -> bool:
        pipe, to = connection.pipes[end], 1 - end
        if not pipe or end in self.cut or pipe[0][0] > self.now or not connection.open[to]:
            return False
        _, data = pipe.popleft()
        if data is None:
            self._end(connection, to)
            return True
        limit = self.reset_at(connection.number)
        carried = self._carried_now.get(connection.number, 0)
        kill = limit is not None and carried + len(data) >= limit
        data = data[: limit - carried] if kill else data
        self._carried_now[connection.number] = carried + len(data)
        self.carried += len(data)
        if not self._feed(connection, to, data):
            self._end(connection, to)
        if kill:
            self._kill(connection)
        return True

    def _feed(self, connection: Connection, to: int, data: bytes) -> bool:
        reception = connection.reception
        while to == 1 and reception is not None and data:
            some, data = data[: reception.wanted], data[reception.wanted :]
            step, end = reception.came(some), self.ends[1]
            if step == Step.REFUSED or (step == Step.ASKS and reception.epoch != end.epoch):
                return False
            if step == Step.ASKS:
                nonce = (1000 + connection.number).to_bytes(16, "big")
                answer = reception.answer(end.epoch, end.expected, end.partial, nonce)
                self._write(connection, 1, answer)
            if step == Step.PROVED:
                self._close(1)
                if not end.adopt(self.now, reception.expected, reception.partial):
                    return False
                self._current[1], connection.reception = connection, None
                reception = None
        return not data or self.ends[to].came(self.now, data)

    def _close(self, rank: int) -> None:
        """An end closes its connection."""
        connection = self._current[rank]
        if connection is None:
            self.ends[rank].broke(self.now)
        else:
            self._end(connection, rank)

    def _end(self, connection: Connection, rank: int) -> None:
        """A connection ends at one end, and the other end hears of it."""
        connection.open[rank] = False
        connection.pipes[rank].append((self.now + self.delay(rank), None))
        if self._current[rank] is connection:
            self._current[rank] = None
            self.ends[rank].broke(self.now)

    def _kill(self, connection: Connection) -> None:
        for pipe in connection.pipes:
            pipe.clear()
        for rank in (0, 1):
            connection.open[rank] = False
            if self._current[rank] is connection:
                self._current[rank] = None
                self.ends[rank].broke(self.now)


def received(end: Any) -> list[bytes]:
    """All messages that have come and were not taken."""
    messages = []
    while (message := end.take()) is not None:
        messages.append(message)
    return messages

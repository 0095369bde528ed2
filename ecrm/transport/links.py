"""The transport over links: connections of our own, which may break at any time.

Messages travel by `ecrm.transport.carrier`: a broken connection costs a new connection, and no
message. `ecrm.transport.membership` says who lives. So a broken link is not a death.

- An exchange is a message of each live rank to each other live rank, then memory apart. Messages
  between hosts are gathered by host (`ecrm.transport.by_host`).
- An agreement disseminates: in round r a rank tells the rank 2^r places further, and hears from the
  rank 2^r places before. After ceil(log2 n) rounds every rank has combined the bits of all ranks.
- A shrink asks the head for the next epoch. An epoch drops all messages under way.

Ranks of a host read each other's shared memory, as over MPI.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ecrm.base.errors import EcrmError, UsageError
from ecrm.kernels.links import Identity, Settings
from ecrm.transport import by_host
from ecrm.transport.base import PeerFailure, Revoked
from ecrm.transport.by_host import FarHost, joined, parted
from ecrm.transport.carrier import Carrier, Figures
from ecrm.transport.membership import (
    REPEAT_SECONDS,
    START_KEEP_ALIVE,
    Admit,
    Member,
    Phase,
    unheard_pause,
)
from ecrm.transport.membership_socket import MemberSocket, Rendezvous
from ecrm.transport.packed import KIND_NAMES, PackedTransport, bits_of, meaning_of

AGREE = len(KIND_NAMES)
CALL_NAMES = (*KIND_NAMES, "agree")
LENT_BYTES = 1 << 16
"""From this size on a message is sent from where it lies."""
LOOK_SECONDS = 0.002
"""Time of a wait between two looks at the news of deaths."""
JOIN_SECONDS = 60.0
ENTER_SECONDS = 10.0
"""The least time without a word of the head after which a newcomer gives up."""
GIVEN_UP = "the head has given this process up"
REFUSALS = {
    "taken": "another process waits to be this rank: name another host, or end the other process",
    "bye": "this rank has finished its work: the run is ending",
}
"""The reasons against a newcomer, by the last word of the head."""
OTHER_FILES = 64
"""Open files of a rank beside a connection to each rank."""
MORE_FILES = 1024
"""Open files, if allowed: strangers, connections made anew, and the files of the user's program."""
MANY_SILENT = 100
"""Connections without a word before a line; a member whose cable loses data makes a few."""
CLOSE_SECONDS = 2.0
HEAD_WORDS = 3
"""Words before a packed message: the stamp, the memory apart, and whether the message is apart."""
LONGEST_SILENCE = 1.0
"""Seconds without a byte before a connection is made anew; half the keep-alive time if shorter."""


@dataclass(frozen=True)
class Machine:
    """The parts of a transport that reach the machine: `ecrm.testing` has doubles of the parts."""

    carrier: Callable[[Identity, int, Settings, str], Carrier] = Carrier
    socket: Callable[[Member, bytes, bytes, str, tuple[str, int]], MemberSocket] = MemberSocket
    clock: Callable[[], float] = time.monotonic


REAL = Machine()


class LinkTransport(PackedTransport):
    """Calls among the ranks of a run over links, later among the members of each epoch.

    A rank that the head fences, or that hears nothing of the head for too long, kills itself.

    A process with a `life` joins a run under way, in the place of a lost rank. `enter` waits for
    the epoch, and comes before any other call. `host` is the name of the process's host then.

    `beats_to` is the place of the agent that carries the beats of this host's ranks. Without such
    an agent the rank beats to the head.

    Not thread safe: a single thread makes all calls. A waiting call sleeps, and holds no GIL.
    Messages of `lent_bytes` or more are lent. Two hosts with `least_ranks` each gather messages.

    Raises EcrmError if this rank cannot join, and UsageError if this host allows too few files.
    """

    lent_bytes = LENT_BYTES
    least_ranks = by_host.LEAST_RANKS

    def __init__(
        self,
        rank: int,
        ranks: int,
        rendezvous: Rendezvous,
        life: str = "",
        host: str = "",
        beats_to: tuple[str, int] | None = None,
        machine: Machine = REAL,
    ) -> None:
        super().__init__(ranks)
        self._clock = machine.clock
        _allow_files(ranks + OTHER_FILES, 2 * ranks + MORE_FILES)
        self.rank, self._told_to_stop = rank, False
        keep_alive = rendezvous.keep_alive
        address = rendezvous.own_address()
        silence = min(LONGEST_SILENCE, keep_alive / 2)
        self._keep_alive = keep_alive
        self._unheard_seconds, self._unheard_pause = keep_alive / 2, unheard_pause(keep_alive)
        settings = Settings(beat=silence / 4, silence=silence, greet=silence / 2)
        identity = Identity(rendezvous.run, rendezvous.secret, rank)
        self._carrier = machine.carrier(identity, ranks, settings, address)
        self.joined, self._head = bool(life), rendezvous.head
        self._beats_to = rendezvous.head if beats_to is None else beats_to
        place = [address, self._carrier.port]
        self._member = Member(rank, place, life, host)
        self._socket = machine.socket(
            self._member, rendezvous.run, rendezvous.secret, address, rendezvous.head
        )
        self._carrier.watch(self._socket.socket)
        self._call_number, self._told_refused, self._told_silent = 0, False, False
        self._next_look = self._next_unheard = 0.0
        self._lent: list[np.ndarray] = []
        self.why_closed: Callable[[], str] = lambda: ""
        """Asked by a newcomer once a second: why no rank can join any more, "" if ranks can."""
        self._places: dict[int, Any] = {}
        if not life:
            self._carrier.lease(*self._beats_to, max(keep_alive, START_KEEP_ALIVE))
            self._join(rendezvous.head)

    @property
    def newcomers_wait(self) -> bool:
        return self._member.waiting

    def enter(self) -> None:
        """As in `Transport`.

        Raises EcrmError if the head is silent, or if this process is not wanted.
        """
        heard = asked = self._clock()
        while not self._member.begun():
            self._socket.turn(seconds=REPEAT_SECONDS)
            told, self._member.told, now = self._member.told, "", self._clock()
            heard = now if told else heard
            why = GIVEN_UP if self._member.fenced else REFUSALS.get(told, "")
            if now > asked + 1.0:
                asked, why = now, why or self.why_closed()
            if now > heard + max(ENTER_SECONDS, self._keep_alive):
                why = "the head of the run at {}:{} does not answer".format(*self._head)
            if why:
                raise EcrmError(f"rank {self.rank} cannot join the run: {why}")
        # beats before the epoch would have no answer
        self._carrier.lease(*self._beats_to, self._keep_alive, self._member.beats)
        self._begin_epoch()
        self._begin_lease()

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        """As in `Transport`; a rank may see `PeerFailure` beside results on other ranks."""
        self._begin()
        bits, count, far = bits_of(flag, word), len(self.live), 1
        me = self.live.index(self.rank)
        while far < count:
            head = np.array([self._stamp(AGREE), bits, 0], np.int64)
            self._send(self.live[(me + far) % count], head.view(np.uint8))
            sender = self.live[(me - far) % count]
            theirs = self._receive(sender)[: 8 * HEAD_WORDS].view(np.int64).tolist()
            self._check_stamp(sender, AGREE, theirs[0])
            bits &= theirs[1]
            far *= 2
        self._end()
        return meaning_of(bits)

    def shrink(self, admit: Admit = Admit.NO) -> None:
        """As in `Transport`.

        Waits for live ranks still computing, without a bound; a hanging rank must be killed from
        outside.
        """
        while not self._member.begun():
            self._news()
            self._member.want(admit)
            self._turn(REPEAT_SECONDS / 5)
        self._begin_epoch()

    def close(self) -> None:
        """Tell the other ranks that this rank leaves on purpose; wait up to 2 s for their leave.

        The messages of this rank arrive before the other ranks hear of the leave, even over a
        connection that breaks meanwhile. Messages that other ranks drop are not waited for. The
        whole takes at most 2 s, or the keep-alive time if longer.
        """
        end = self._clock() + max(CLOSE_SECONDS, self._keep_alive)
        self._carrier.acknowledge_all()
        while not (
            self._carrier.all_acked(LOOK_SECONDS, self._away())
            or self._member.revoked
            or self._clock() > end - CLOSE_SECONDS / 2
        ):
            self._news()
            self._turn()
        self._carrier.end_lease()
        self._member.leave()
        end = min(end, self._clock() + CLOSE_SECONDS)
        while self._clock() < end and not self._member.all_left():
            self._carrier.acknowledge_all()
            self._socket.turn(seconds=REPEAT_SECONDS / 5)
        self._socket.close()
        self._carrier.close()

    def figures(self) -> Figures:
        """Counts of this rank's links."""
        return self._carrier.figures()

    def cut(self, rank: int) -> bool:
        """Shut down the connection to a rank, for drills; False without a connection."""
        return self._carrier.cut(rank)

    def _join(self, head: tuple[str, int]) -> None:
        deadline = self._clock() + JOIN_SECONDS
        while self._member.phase is Phase.JOINING:
            self._news()
            self._socket.turn(seconds=REPEAT_SECONDS)
            if self._member.fenced:
                self._die()
            if self._clock() > deadline:
                raise EcrmError(
                    f"rank {self.rank}: not all ranks have joined within {JOIN_SECONDS:.0f} s; "
                    f"the head is {head[0]}:{head[1]}"
                )
        self._begin_epoch()  # first: the head counts a rank with a lease as connected
        self._begin_lease()

    def _begin_lease(self) -> None:
        """Begin the lease of a member; without an answer the process ends, and does no harm."""
        self._carrier.begin_lease(self._keep_alive)
        while not self._carrier.leased():
            self._socket.turn(seconds=REPEAT_SECONDS / 5)
            if self._member.fenced:
                self._die()

    def _begin_epoch(self) -> None:
        self.live = self._member.live
        for rank, place in enumerate(self._member.places):
            if place is not None and rank != self.rank and self._places.get(rank) != place:
                self._carrier.peer(rank, *place)
                self._places[rank] = place
        self._carrier.begin_epoch(self._member.epoch, self.live)
        self._lent.clear()
        self._call_number = 0
        self._shared_memory.keep(self.live)
        places = self._member.places  # None for a rank that died before it had joined
        self._routes = by_host.routes(
            self.rank,
            self.live,
            {rank: places[rank] and places[rank][0] for rank in self.live},
            self.least_ranks,
        )

    def _deliver(
        self, kind: int, packed: list[np.ndarray], apart: list[list[np.ndarray]]
    ) -> Mapping[int, tuple[np.ndarray, list[np.ndarray]]]:
        self._begin()
        stamp, routes, lent = self._stamp(kind), self._routes, self.lent_bytes
        heads, memory = {}, {}
        for place, rank in enumerate(self.live):
            heads[rank], memory[rank] = _message_of(stamp, packed[place], apart[place], lent)
        for rank in routes.direct:
            self._send_all(rank, [heads[rank], *memory[rank]])
        came: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}
        parts = self._hand_over(kind, heads)
        for rank in routes.here:
            if rank != self.rank:
                came[rank] = self._receive_message(rank, kind)
            for far in parts:
                parts[far].append(parts[far][0] if rank == self.rank else self._receive(rank))
        for far in parts:
            self._send(far.theirs, joined(stamp, parts[far][1:]))
        for far in routes.far:  # behind the gathered messages, as the other host takes them
            for rank in far.ranks:
                self._send_all(rank, memory[rank])
        for rank, head in self._spread(kind, list(parts)).items():
            came[rank] = self._completed(rank, kind, head)
        for rank in routes.direct:
            if rank not in came:
                came[rank] = self._receive_message(rank, kind)
        self._flush()
        self._end()
        came[self.rank] = packed[self.live.index(self.rank)], []
        return {rank: came[rank] for rank in self.live}

    def _hand_over(
        self, kind: int, heads: Mapping[int, np.ndarray]
    ) -> dict[FarHost, list[np.ndarray]]:
        """Hand the messages for other hosts to their gatherers.

        Returns the part of this rank for each host of which this rank is the gatherer.
        """
        own = {}
        for far in self._routes.far:
            part = joined(self._stamp(kind), [heads[rank] for rank in far.ranks])
            if far.gatherer == self.rank:
                own[far] = [part]
            else:
                self._send(far.gatherer, part)
        return own

    def _spread(self, kind: int, mine: list[FarHost]) -> dict[int, np.ndarray]:
        """Spread the messages of the hosts of `mine`; return the messages to this rank."""
        here, own = self._routes.here, {}
        for far in mine:
            theirs = self._receive_joined(far.theirs, kind, len(far.ranks))
            parts = [parted(part, len(here)) for part in theirs]
            for place, rank in enumerate(here):
                of_rank = [part[place] for part in parts]
                if rank == self.rank:
                    own[far] = of_rank
                else:
                    self._send(rank, joined(self._stamp(kind), of_rank))
        heads: dict[int, np.ndarray] = {}
        for far in self._routes.far:
            came = own.get(far) or self._receive_joined(far.gatherer, kind, len(far.ranks))
            heads.update(zip(far.ranks, came))
        return heads

    def _receive_joined(self, rank: int, kind: int, count: int) -> list[np.ndarray]:
        whole = self._receive(rank)
        self._check_stamp(rank, kind, int(whole[:8].view(np.int64)[0]))
        return parted(whole, count)

    def _flush(self) -> None:
        """Wait until no memory is lent."""
        while self._lent:
            gone = self._member.left
            if self._carrier.flush(LOOK_SECONDS):
                break
            if gone and self._carrier.flush(0.0, gone) and not self._carrier.flush(0.0):
                raise PeerFailure(f"ranks {sorted(gone)} have left")
            self._look()
        self._lent.clear()

    def _send_all(self, rank: int, memory: Sequence[np.ndarray]) -> None:
        for each in memory:
            self._send(rank, each)

    def _receive_message(self, rank: int, kind: int) -> tuple[np.ndarray, list[np.ndarray]]:
        return self._completed(rank, kind, self._receive(rank))

    def _completed(
        self, rank: int, kind: int, message: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """A message of a rank, with the memory that comes behind the message."""
        stamp, pieces, outside = message[: 8 * HEAD_WORDS].view(np.int64).tolist()
        self._check_stamp(rank, kind, stamp)
        packed = self._receive(rank) if outside else message[8 * HEAD_WORDS :]
        return packed, [self._receive(rank) for _ in range(pieces)]

    def _send(self, rank: int, memory: np.ndarray) -> None:
        lend = memory.nbytes >= self.lent_bytes
        if lend:
            self._lent.append(memory)
        while True:
            gone = rank in self._member.left
            if self._carrier.send(rank, memory, lend):
                return
            if gone:
                raise PeerFailure(f"rank {rank} has left")
            # the window is full: the peer is slow, or away
            self._carrier.all_acked(LOOK_SECONDS)
            self._look()

    def _receive(self, rank: int) -> np.ndarray:
        while True:
            gone = rank in self._member.left
            message = self._carrier.receive(rank, LOOK_SECONDS)
            if message is not None:
                return message
            if gone:
                raise PeerFailure(f"rank {rank} has left")
            self._carrier.acknowledge_all()
            self._look()

    def _begin(self) -> None:
        """A call begins: it fails at once, if the head has told of a death or a shrink."""
        self._call_number += 1
        self._turn()
        self._heed()

    def _end(self) -> None:
        """A call ends: take reports back of ranks heard again, since the next look may be far."""
        if self._member.reported:
            self._turn()

    def _look(self) -> None:
        """Look for news in a wait. Raises PeerFailure after a death, and after a shrink."""
        self._news()
        self._turn()
        self._heed()

    def _turn(self, seconds: float = 0.0) -> None:
        """Exchange words with the head; wait so many seconds for the first word to come."""
        self._member.know_news(self._carrier.news())
        self._socket.turn(self._unheard(), seconds)

    def _news(self) -> None:
        if self._member.fenced:
            self._die()
        if self._member.stop in (signal.SIGINT, signal.SIGTERM) and not self._told_to_stop:
            self._told_to_stop = True
            os.kill(os.getpid(), self._member.stop)
        now = self._clock()
        if now >= self._next_look and not (self._told_refused and self._told_silent):
            self._next_look = now + REPEAT_SECONDS
            self._tell_of_strangers()

    def _tell_of_strangers(self) -> None:
        figures = self._carrier.figures()
        if figures.refused and not self._told_refused:
            self._told_refused = True
            _say(
                f"ecrm: rank {self.rank}: {figures.refused_address} is no member of this run: "
                "refused (told once)"
            )
        if figures.silent >= MANY_SILENT and not self._told_silent:
            self._told_silent = True
            _say(
                f"ecrm: rank {self.rank}: {figures.silent} connections said nothing, the last of "
                f"{figures.silent_address}: closed (told once)"
            )

    def _heed(self) -> None:
        member = self._member
        if member.fenced:
            self._die()
        dead = member.dead.intersection(self.live)
        if dead:
            raise PeerFailure(f"ranks {sorted(dead)} died")
        if member.revoked:
            raise Revoked("another rank is recovering from a failure")

    def _unheard(self) -> list[int] | None:
        """Live ranks without a byte for too long; `None` between two looks."""
        now = self._clock()
        is_early = now < self._next_unheard
        asked = self._member.reported if is_early else self.live
        if is_early and not asked:
            return None
        away = self._away()
        unheard = [
            rank
            for rank in asked
            if rank not in away and self._carrier.down(rank) > self._unheard_seconds
        ]
        if is_early and len(unheard) == len(asked):
            return None
        self._next_unheard = now + self._unheard_pause
        return unheard

    def _away(self) -> frozenset[int]:
        """This rank, and ranks that are dead or have left."""
        return self._member.dead | self._member.left | {self.rank}

    def _stamp(self, kind: int) -> int:
        return self._call_number * len(CALL_NAMES) + kind

    def _check_stamp(self, rank: int, kind: int, stamp: int) -> None:
        if stamp != self._stamp(kind):
            call, theirs = divmod(stamp, len(CALL_NAMES))
            raise RuntimeError(
                f"rank {rank} is in its call {call} ({CALL_NAMES[theirs]}), "
                f"rank {self.rank} in its call {self._call_number} ({CALL_NAMES[kind]})"
            )

    def _die(self) -> NoReturn:
        _say(f"ecrm: rank {self.rank} is given up by the head machine: rank killed")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def _message_of(
    stamp: int, packed: np.ndarray, apart: list[np.ndarray], lent_bytes: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """A message of packed tensors, and the memory to send behind the message.

    Packed tensors of `lent_bytes` or more are sent behind the message.
    """
    inside = packed.nbytes < lent_bytes
    message = np.empty(8 * HEAD_WORDS + (packed.nbytes if inside else 0), np.uint8)
    message[: 8 * HEAD_WORDS].view(np.int64)[:] = stamp, len(apart), not inside
    if inside:
        message[8 * HEAD_WORDS :] = packed
    return message, apart if inside else [packed, *apart]


def _allow_files(needed: int, wanted: int) -> None:
    """Raise the soft limit of open files to `wanted`, as far as allowed.

    Raises UsageError if `needed` is above the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"a rank needs {needed} open files for its connections, and {socket.gethostname()} "
            f"allows {hard}: raise the hard limit there (ulimit -Hn {needed}), or start fewer ranks"
        )
    if soft != resource.RLIM_INFINITY and wanted > soft:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _say(line: str) -> None:
    os.write(2, line.encode() + b"\n")

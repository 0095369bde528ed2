"""A simulated cluster whose ranks talk over links: the real links, membership and transport.

`kernels/links`, `ecrm.transport.membership` and `ecrm.transport.links` run unchanged, in virtual
time. Doubles stand for sockets, the thread of the carrier and the clock. Connections are reset at
any byte, links are slow or cut one way, datagrams to the head are lost, late and doubled.

The rules: a rank dies because a fault of the plan says so, or its host is the host to be given up
after a cut for good. Any other loss breaks the run off.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, NoReturn

from ecrm.base.errors import EcrmError
from ecrm.kernels import links
from ecrm.kernels.links import Identity, Settings
from ecrm.testing.simulated_transport.cluster import Member, SimulatedCluster
from ecrm.testing.simulated_transport.fault_plan import DURING, Fault, PhaseFault, RandomFaults
from ecrm.testing.simulated_transport.link_carrier import SimulatedCarrier
from ecrm.testing.simulated_transport.network import HEAD, Connection, LinkFaults, Network
from ecrm.testing.simulated_transport.outcome import (
    RankKilled,
    Result,
    SimulationDeadlock,
    SimulationError,
    SimulationTooLong,
)
from ecrm.testing.simulated_transport.virtual_time import VirtualTime
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.links import LinkTransport, Machine
from ecrm.transport.membership import Admit, Head
from ecrm.transport.membership import Member as LinkMember
from ecrm.transport.membership_socket import (
    MemberSocket,
    Rendezvous,
    decoded,
    encoded,
    secret_to,
)
from ecrm.transport.message import Part, Received

RUN, SECRET = b"a simulated run.", b"secret of a simulated run"
MOST_SECONDS = 120.0
"""Virtual seconds after which a run counts as hanging."""
SHORT_CUT = 0.2
"""The time of a cut that must cost no host, in keep-alive times.

A dial into the cut may cost T / 4 more, and the head counts a pair reported after T / 2.
"""
LONG_SHARE = 0.02
"""Share of the pauses of a program that are longer than the keep-alive time."""
AGREE, SHRINK = "agree", "shrink"
CUTS, PARTINGS, LOST, GATHERED = (
    "short cuts of links",
    "cuts for good",
    "ranks given up",
    "epochs with messages gathered by host",
)


@dataclass(frozen=True)
class _Rendezvous(Rendezvous):
    """The rendezvous of a simulated run, on a host."""

    host: int = 0

    def own_address(self) -> str:
        return f"host {self.host}"


class Process:
    """A life of a rank: its carrier, its socket to the head, and its waits."""

    def __init__(self, cluster: LinkCluster, member: Member, life: str) -> None:
        self._cluster, self._member, self.life = cluster, member, life
        self.rank, self.host = member.rank, cluster.hosts[member.rank]
        self.carrier: SimulatedCarrier | None = None
        self.datagrams: list[bytes] = []
        self.done: Callable[[], bool] | None = None
        self.wait_number = 0

    def wait(self, seconds: float, done: Callable[[], bool], deaf: bool = False) -> None:
        """Let virtual time pass until `done`, or until a datagram comes if not `deaf`."""
        if seconds:
            over = done if deaf else lambda: bool(self.datagrams) or done()
            self._cluster.wait(self, self._member, seconds, over)

    def touch(self) -> None:
        """Something has happened to this process."""
        if self.done is not None and self.done():
            self._cluster.wake(self._member)

    def begins(self, epoch: int, live: Collection[int]) -> None:
        """This process begins an epoch."""
        self._cluster.begins(self.rank, epoch, live)

    def beat(self, number: int, begun: bool) -> None:
        """A sign of life goes to the head."""
        self._cluster.network.datagram(self.host, HEAD, self._cluster.beats, self, number, begun)

    def lease_is_over(self) -> None:
        """This process has heard nothing of the head for too long."""
        self._cluster.gives_up(self.rank, "its lease is over")


class SimulatedSocket(MemberSocket):
    """As `MemberSocket`, on the simulated network."""

    def __init__(
        self,
        cluster: LinkCluster,
        process: Process,
        member: LinkMember,
        run: bytes,
        secret: bytes,
        address: str,
        head: tuple[str, int],
    ) -> None:
        self._cluster, self._process, self._member = cluster, process, member
        self.socket: Any = None
        self._said = 0

    def turn(self, unheard: Collection[int] | None = None, seconds: float = 0.0) -> None:
        for message in self._member.due(self._cluster.time.now, unheard):
            self._said += 1
            text = encoded(RUN, SECRET, {**message, "said": self._said})
            host, hears = self._process.host, self._cluster.head_hears
            self._cluster.network.datagram(host, HEAD, hears, self._process, text)
        self._process.wait(seconds, lambda: False)
        while self._process.datagrams:
            text = self._process.datagrams.pop(0)
            answer = decoded(RUN, secret_to(SECRET, self._process.rank), text)
            if answer is not None:
                self._member.hear(answer)

    def close(self) -> None:
        """No datagram comes any more."""


class SimulatedLinks(LinkTransport):
    """The real transport over links, of a simulated rank."""

    def __init__(self, cluster: LinkCluster, process: Process) -> None:
        self._cluster, self._process = cluster, process
        self._entered, faults = not process.life, cluster.faults
        self.lent_bytes, self.least_ranks = faults.lent_bytes, faults.least_ranks
        rendezvous = _Rendezvous(RUN, SECRET, ("head", 0), faults.keep_alive, process.host)
        machine = Machine(
            partial(_carrier, cluster, process),
            partial(SimulatedSocket, cluster, process),
            lambda: cluster.time.now,
        )
        ranks, host = len(cluster.hosts), f"host {process.host}"
        super().__init__(process.rank, ranks, rendezvous, process.life, host, machine=machine)

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> Mapping[int, list[Received]]:
        return self._cluster.call(self.rank, "exchange", partial(super().exchange, outgoing))

    def share(self, tensors: Sequence[Part]) -> Mapping[int, list[Received]]:
        return self._cluster.call(self.rank, "share", partial(super().share, tensors))

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        return self._cluster.call(self.rank, AGREE, partial(super().agree_alike, flag, word))

    def shrink(self, admit: Admit = Admit.NO) -> None:
        self._cluster.call(self.rank, SHRINK, partial(super().shrink, admit))
        self._cluster.tell(self.rank, f"live are {self.live}")

    def enter(self) -> None:
        """As in `Transport`; a second call has no effect."""
        if not self._entered:
            self._entered = True
            super().enter()

    def close(self) -> None:
        self._cluster.closes(self.rank)
        super().close()

    def _begin_epoch(self) -> None:
        super()._begin_epoch()
        gathered = self._cluster.gathered
        if self._routes.far and self._member.epoch not in gathered:
            gathered.add(self._member.epoch)
            self._cluster.mix[GATHERED] += 1

    def _die(self) -> NoReturn:
        self._cluster.gives_up(self.rank, "is fenced")
        raise RankKilled


def _carrier(
    cluster: LinkCluster,
    process: Process,
    me: Identity,
    world: int,
    settings: Settings,
    address: str,
) -> SimulatedCarrier:
    process.carrier = SimulatedCarrier(cluster.network, process, me, world, settings, address)
    return process.carrier


class LinkCluster(SimulatedCluster):
    """As `SimulatedCluster`, with ranks that talk over links.

    hosts: the host of each rank, by default a host per rank. network: the behaviour of connections
    and datagrams. may_lose: asked with ranks of a host before a cut for good that costs these
    ranks; no such cut without a yes. kind: the links, `ecrm.kernels.links` or the reference.
    """

    def __init__(
        self,
        world_size: int,
        seed: int | str,
        faults: RandomFaults | Iterable[Fault | PhaseFault] = (),
        *,
        hosts: Sequence[int] | None = None,
        network: LinkFaults | None = None,
        may_lose: Callable[[list[int]], bool] = lambda ranks: False,
        kind: Any = None,
        **more: Any,
    ) -> None:
        super().__init__(world_size, seed, faults, **more)
        self.hosts = tuple(range(world_size)) if hosts is None else tuple(hosts)
        self.faults, self._may_lose = network or LinkFaults(), may_lose
        self._draw, self.time = Random(f"links {seed}"), VirtualTime()
        self.network = Network(self.time, self._draw, self.faults, kind or links)
        self.network.mix = self.mix
        self.head = Head([f"host {host}" for host in self.hosts], self.faults.keep_alive)
        self._where: dict[tuple[int, str], Process] = {}
        self._said: dict[Process, int] = {}
        self.gathered: set[int] = set()
        """The epochs with messages gathered by host."""
        self._beats: dict[int, int] = {}
        self.processes: dict[int, Process] = {}
        self._transports: dict[int, SimulatedLinks] = {}
        self._lives = 0
        self._entering: set[int] = set()
        self.given_up: set[int] = set()
        self._closing: set[int] = set()
        self._partings = self.faults.partings
        self._parted: tuple[int, int] | None = None
        self._quiet_from = 0.0
        self.time.after(0.0, self._tick)
        if self.faults.pause < math.inf:
            self.time.after(self._draw.expovariate(1 / self.faults.pause), self._disturb)

    # Lives of ranks.

    def _transport_of(self, member: Member, joined: bool) -> Transport:
        rank = member.rank
        if not joined:
            self.processes[rank] = Process(self, member, "")
        process = self.processes[rank]
        self._transports[rank] = transport = SimulatedLinks(self, process)
        if joined:
            try:
                transport.enter()
            except EcrmError as error:
                self._bury(member, f"cannot join: {error}")
                raise RankKilled from None
            self._entering.discard(rank)
            member.calls_since_shrink = 0
            self._note(member, f"joins {transport.live}")
        return transport

    def _returns(self, member: Member) -> bool:
        if not member.dead or self._broken is not None or all(m.gone for m in self._members):
            return False
        if self._parted:  # the head would choose another host
            return False
        delay = self._plan.returns()
        if delay is None:
            return False
        self._lives += 1
        process = self.processes[member.rank] = Process(self, member, f"life {self._lives}")
        self._entering.add(member.rank)
        member.dead = member.gone = False
        self._on_return(member.rank)
        self._note(member, "comes back")
        try:
            process.wait(0.002 * delay, lambda: False, deaf=True)
        except RankKilled:
            return False
        return True

    def leave(self, rank: int) -> None:
        member = self._members[rank]
        if not member.gone:
            self._transports[rank].close()
            self._stop_if_gone(member)
            member.gone = True
            self._note(member, "leaves")

    def live(self, rank: int) -> tuple[int, ...]:
        return self._transports[rank].live

    def call(self, rank: int, method: str, act: Callable[[], Result]) -> Result:
        """Make a call of a rank's transport, in which the rank may die."""
        member = self._members[rank]
        when = self._begin(member, method)
        if when == DURING:
            seconds = self._draw.random() * 10 * self.faults.latency
            self.time.after(seconds, self._dies_in, member, member.call_index)
        try:
            result = act()
        except PeerFailure:
            self._note(member, "fails")
            self._die_if(member, when)
            raise
        if method not in (AGREE, SHRINK) and self._plan.loses_touch():
            self._note(member, "loses touch")
            self._die_if(member, when)
            raise PeerFailure(f"{method}: lost touch")
        self._note(member, "completes")
        self._die_if(member, when)
        return result

    def _dies_in(self, member: Member, call_index: int) -> None:
        if member.call_index == call_index and member.waiting and not member.gone:
            self._kill_where_it_is(member)

    def enter_phase(self, rank: int, step: int, phase: str) -> None:
        super().enter_phase(rank, step, phase)
        if self._draw.random() < self.faults.computes:
            long = self._draw.random() < LONG_SHARE
            seconds = 1.5 * self.faults.keep_alive if long else self._draw.random() * 0.01
            self.processes[rank].wait(seconds, lambda: False, deaf=True)

    def closes(self, rank: int) -> None:
        """A rank begins to leave."""
        self._closing.add(rank)

    def begins(self, rank: int, epoch: int, live: Collection[int]) -> None:
        """A rank begins an epoch: ranks outside the epoch must have ended."""
        for member in self._members:
            outside = {member.rank}.difference(live, self._entering, self._closing)
            if outside and not member.gone:
                beside = f"rank {member.rank} lives beside epoch {epoch} of ranks {live}"
                self._break_off(SimulationError, beside)

    def gives_up(self, rank: int, why: str) -> None:
        """A rank ends by a fence or its lease: a loss that the rules must allow."""
        member = self._members[rank]
        if member.gone:
            return
        self.mix[LOST] += 1
        if rank not in self.given_up:
            lost = f"rank {rank} {why}, and no rule says so: {self.head.lines}"
            self._break_off(SimulationError, lost)
        if member.waiting:
            self._kill_where_it_is(member)
        else:
            self._bury(member, why)

    def _mourn(self, member: Member) -> None:
        process = self.processes.get(member.rank)
        if process is None:
            return
        silent = self._draw.random() < self.faults.silent
        if process.carrier is not None:
            process.carrier.end(Connection.vanish if silent else Connection.close)
        if not silent or process.carrier is None:
            self.time.after(self._draw.random() * 0.2, self._told, process)
        self.given_up.discard(member.rank)
        if self._parted and not self.given_up:
            self._mend()

    def _told(self, process: Process) -> None:
        """The watcher of the hosts tells of the death of a process."""
        now, rank = self.time.now, process.rank
        if process.life:
            self.head.hear(now, {"is": "gone", "rank": rank, "epoch": 1, "life": process.life})
        else:
            self.head.hear_of_deaths(now, [rank])
        self._head_sends()

    # The head.

    def head_hears(self, process: Process, text: bytes) -> None:
        """A datagram of a process comes to the head."""
        message = decoded(RUN, SECRET, text)
        assert message is not None
        if message["said"] <= self._said.get(process, 0):
            return
        self._said[process] = message["said"]
        self._where[process.rank, process.life] = process
        self.head.hear(self.time.now, message)
        self._head_sends()

    def beats(self, process: Process, number: int, begun: bool) -> None:
        """A beat of a process comes to the head; as `HeadServer`."""
        rank = process.rank
        if number > self._beats.get(rank, 0) and self.head.beat(self.time.now, rank, begun):
            self._beats[rank] = number
            assert process.carrier is not None
            self.network.datagram(
                HEAD, process.host, process.carrier.heard, number, self.head.news()
            )

    def _tick(self) -> None:
        self.head.tick(self.time.now)
        self._head_sends()
        self.time.after(self.head.next(), self._tick)

    def _head_sends(self) -> None:
        for rank, message in self.head.take():
            process = self._where.get((rank, message.get("life", "")))
            if process is not None:
                text = encoded(RUN, secret_to(SECRET, rank), message)
                self.network.datagram(HEAD, process.host, _arrives, process, text)

    # Faults of the network.

    def _disturb(self) -> None:
        """A fault between two hosts, or between a host and the head."""
        self.time.after(self._draw.expovariate(1 / self.faults.pause), self._disturb)
        living = [m.rank for m in self._members if not m.gone]
        hosts = sorted({self.hosts[rank] for rank in living})
        if len(hosts) < 2:
            return
        one, other = sorted(self._draw.sample(hosts, 2), key=self._turn_of)
        chance = self._draw.random()
        if chance < 0.5:
            self._reset(one, other)
        elif self.time.now < self._quiet_from or self._parted:
            return
        elif chance < 0.8:
            self._cut(one, self._draw.choice((other, HEAD)), SHORT_CUT * self.faults.keep_alive)
            self.mix[CUTS] += 1
        elif self._partings and not self._entering:
            # of two hosts that do not hear each other the head gives up the last
            end, lost = self._draw.choice(((one, other), (HEAD, one)))
            ranks = [rank for rank in living if self.hosts[rank] == lost]
            if self._may_lose(ranks):
                self._partings -= 1
                self.given_up.update(ranks)
                self._cut(end, lost, math.inf)
                self._parted = end, lost
                self.mix[PARTINGS] += 1

    def _turn_of(self, host: int) -> tuple[int, int]:
        """The place of a host among hosts that do not hear each other, as in `chosen`."""
        place = list(dict.fromkeys(self.hosts)).index(host)
        return self.head.joined.get(place, 0), place

    def _reset(self, one: int, other: int) -> None:
        """Reset all connections between two hosts."""
        if not self.network.may_reset(one, other):
            return
        for process in list(self.processes.values()):
            if process.host == one and process.carrier is not None:
                for connection in process.carrier.connections_to(other):
                    connection.reset(*self.network.late_end())

    def _cut(self, one: int, other: int, seconds: float) -> None:
        """Cut a link, one way or both ways."""
        ways = [(one, other), (other, one)]
        until = self.time.now + seconds
        self.network.calm_until = until + self.faults.keep_alive / 2
        for way in self._draw.choice((ways, ways[:1], ways[1:])):
            self.network.cut(*way, until)
        self._quiet_from = until + 1.5 * self.faults.keep_alive

    def _mend(self) -> None:
        assert self._parted is not None
        one, other = self._parted
        self._parted, now = None, self.time.now
        self.network.calm_until = now
        for way in ((one, other), (other, one)):
            self.network.cut(*way, now)
        self._quiet_from = now + 1.5 * self.faults.keep_alive

    # Waiting.

    def wait(
        self, process: Process, member: Member, seconds: float, done: Callable[[], bool]
    ) -> None:
        """Let virtual time pass until `done`, for so many seconds at most."""
        self._stop_if_gone(member)
        end = self.time.now + seconds
        process.wait_number += 1
        process.done = done
        self.time.at(end, self._over, process, member, process.wait_number)
        while not done() and self.time.now < end:
            self._wait(member)
        process.done = None

    def _over(self, process: Process, member: Member, number: int) -> None:
        if process is self.processes[process.rank] and process.wait_number == number:
            self._wake(member)

    def wake(self, member: Member) -> None:
        """A rank that waits goes on."""
        self._wake(member)

    def _when_all_wait(self) -> None:
        """Let the next event happen. Ranks that wait to join end with the last of the others."""
        there = [member for member in self._members if not member.gone]
        if there and self._entering.issuperset(member.rank for member in there):
            for member in there:
                member.dead = member.gone = True
                self._wake(member)
            return
        try:
            happens = self.time.advance()
        except Exception:
            self._break_off(SimulationError, traceback.format_exc())
            return
        if not happens:
            self._break_off(SimulationDeadlock, "nobody can go on")
        elif self.time.now > MOST_SECONDS:
            waits = [f"rank {m.rank} in {m.method} (its call {m.call_index})" for m in there]
            hanging = f"not over after {MOST_SECONDS:.0f} s of virtual time: {', '.join(waits)}"
            self._break_off(SimulationTooLong, hanging)


def _arrives(process: Process, text: bytes) -> None:
    process.datagrams.append(text)
    process.touch()

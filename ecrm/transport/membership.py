"""The members of a run: the epochs, leases and fences, as state machines without I/O.

A single head decides who lives. Members and head exchange messages that may be lost, repeated,
reordered or late: all messages are idempotent, and a member repeats its wish until the answer
comes. `ecrm.transport.membership_socket` carries the messages by UDP, out of reach of a reset.

    member:  JOINING --world--> LIVE(e) --shrink--> WANTING(e) --new--> LIVE(e+1)
                                   |                    |
                                   +--- fence, or its lease is over: the process is killed
                                   +--- close --> LEAVING(e)

| message | from | says |
|---|---|---|
| join | member | my address; answered by `world` once all have joined |
| ask | member | a look at the state, after an answer to a beat tells of news; answered by `state` |
| want | member | my calls of this epoch have ended |
| unheard | member | no byte of these ranks for half the keep-alive time; none: all are heard |
| leave | member | this rank leaves on purpose |
| revoke | head | a member wants the next epoch: end the calls of this epoch |
| new | head | the next epoch, and its members |
| fence | head | this rank is no member: its process ends at once |
| bye | head | this rank has left, and the others have gone on |
| enter | newcomer | this process wants to be a lost rank, and listens at `at` on `host` |
| wait | head | the newcomer waits for an epoch that admits ranks; says a `number` |
| gone | watcher | the process of a rank that has joined is dead |
| died | watcher | the processes of these ranks, of the start, are dead |
| members | watcher | how many members live? answered by `members` |
| stop | watcher | all members get this signal, in the `state`: no rank of the start is left |

A new epoch begins once all members of the epoch want it, except the dead and the members that have
left. A fenced member counts as dead once its death is told, or once its lease is over. The lease of
a member lasts 0.8 keep-alive times from the last beat with an answer; the head waits for a whole
keep-alive time from this answer. A fenced member is therefore gone before others go on.

A lost rank may join again, as a process with a *life*: a text of the process, in all messages of
the process and in all messages to the process. The process of the start has the life "". An epoch
has the ranks that wait if a member of the epoch before asks so, and all other members admit ranks.
A rank joins one epoch after its death at the earliest, and once the lease of the process before is
over for certain. Words of another life of a rank have no effect. The head gives each newcomer a
number, and only a newcomer that says the number can join: a replayed `enter` has another number.

The head is a single point of failure: its loss ends the run. To replace a lost head, the epoch, the
members and the time of the last answers would have to be replicated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from ecrm.base.wording import named

REPEAT_SECONDS = 0.05
"""Time before a member first repeats a wish without an answer."""
LONGEST_JOIN_PAUSE = 1.0
"""The time before a member asks again to join doubles up to this time."""
ASK_SECONDS = 0.25
"""Longest time between two looks, or two wishes for an epoch, of a member without an answer."""
LATE_SECONDS = 30.0
"""Seconds after the first rank has joined, after which the missing ranks are told."""
ENTER_PATIENCE = 1.0
"""The least seconds without a word after which a newcomer counts as gone."""
GATHER = 0.25
"""Share of the keep-alive time from first pair to choice: a host may be in several pairs."""
HEARD = 0.5
"""Share of the keep-alive time in which the head has had a beat of a rank that it hears.

A rank that the head does not hear may be dead, and its lease decides. A live host is not to be
given up for its pair with a dead host. Nor is a rank given up that has no word on the epoch yet: it
refuses connections of the epoch.
"""
START_KEEP_ALIVE = 10.0
"""The least keep-alive time of a rank until its first epoch, while all ranks of a host load torch.

A rank without a call can harm nobody.
"""
HEAD_PATIENCE = 1.0
"""Share of the keep-alive time for which the head waits for a beat.

More than the patience of clients (`ecrm.process.remote_agent`), which tell the reason of a loss.
"""
FORGOTTEN = 0.15
"""Share of the keep-alive time after which a pair without a report is forgotten."""
LASTING = 1.5
"""Pauses between two reports for which a pair must have been reported to count."""
TAKINGS_BACK = 3
"""Messages that take a report of unheard ranks back."""
MOST_UNHEARD_PAUSE = 0.1
"""Seconds between two reports of a member on unheard ranks; less for a short keep-alive time."""


def unheard_pause(keep_alive: float) -> float:
    """The seconds between two reports: at most a fourth of the time to forget a pair."""
    return min(MOST_UNHEARD_PAUSE, FORGOTTEN / 4 * keep_alive)


class Admit(IntEnum):
    """What a rank wants of a shrink for ranks that wait to join: none of them, may come, come."""

    NO, MAY, ASKS = range(3)


Message = dict[str, Any]
"""Values are those of JSON. `is` names the kind; `rank` and `epoch` are the sender's."""


def chosen(pairs: Collection[tuple[int, int]], joined: Mapping[int, int] | None = None) -> set[int]:
    """The hosts to give up, by place in the hosts file, to leave no pair.

    Hosts are chosen in turn: the host in most pairs, of several such hosts the host that has joined
    last, then the last by place. `joined` has the epoch of the last join of a host: a host that
    has come back over a cut link must not cost a host with rows.
    """
    since, gone = joined or {}, set[int]()
    while left := [pair for pair in pairs if not gone & set(pair)]:
        count = Counter(host for pair in left for host in pair)
        gone.add(max(count, key=lambda host: (count[host], since.get(host, 0), host)))
    return gone


@dataclass
class Newcomer:
    """A process that wants to be a lost rank; `heard` is the time of its last proven word."""

    life: str
    host: str
    at: Any
    number: int
    heard: float = -math.inf


class Head:
    """The head's knowledge. Messages to send gather in `outbox`, lines to tell in `lines`.

    Times are seconds of any clock without steps back.
    """

    def __init__(self, hosts: Sequence[str], keep_alive: float) -> None:
        """`hosts` has the host of each rank."""
        self._hosts, self._keep_alive = list(hosts), keep_alive
        self._names = list(dict.fromkeys(hosts))
        self._place = [self._names.index(host) for host in hosts]
        self._places: dict[int, list[Any]] = {}
        self._answered: dict[int, float] = {}
        self._pairs: dict[int, dict[int, list[float]]] = {}
        """The first and the last report on an unheard rank, by the rank that reports."""
        self._wanting: set[int] = set()
        self._admitting: dict[int, int] = {}
        self._begun: set[int] = set()
        self._leased: set[int] = set()
        self._waiting: dict[int, Newcomer] = {}
        self._newcomers = 0
        self._lives: dict[int, str] = {}
        self._joins: Counter[int] = Counter()
        self.joined: dict[int, int] = {}
        """The epoch of the last join, by the place of a host."""
        self._now, self._first_join, self._told_missing = 0.0, math.inf, False
        self._departed: set[int] = set()
        self.epoch = 1
        self.live = set(range(len(hosts)))
        self.dead: set[int] = set()
        """Members of this epoch that are dead for certain."""
        self.fenced: set[int] = set()
        """Members of this epoch that must die, or are dead."""
        self.left: set[int] = set()
        self.stop: Any = None
        """The signal by which members are asked to stop, if any."""
        self.outbox: dict[tuple[int, str, str], Message] = {}
        """At most one message of a kind to a life of a rank; a later message replaces it."""
        self.lines: list[str] = []
        self._news, self._state_before = 0, [1, self._state()]

    def hear(self, now: float, message: Mapping[str, Any]) -> None:
        """Take a message of a member. A message of another form has no effect."""
        rank, epoch, kind = message.get("rank"), message.get("epoch"), message.get("is")
        life, self._now = message.get("life", ""), now
        if not isinstance(rank, int) or not 0 <= rank < len(self._hosts):
            return
        if not isinstance(life, str):
            return
        if kind == "enter" and life:
            self._enter(rank, life, message)
        elif kind == "gone":
            if life and life == self._lives.get(rank):
                self.died(now, [rank])
            elif life and rank in self._waiting and self._waiting[rank].life == life:
                del self._waiting[rank]
        elif life != self._lives.get(rank, ""):
            self._say(rank, "fence", life)
        elif rank in self._departed:
            self._say(rank, "bye")
        elif rank not in self.live or rank in self.fenced:
            self._say(rank, "fence")
        elif kind == "join":
            self._join(now, rank, message.get("at"))
        elif epoch != self.epoch:
            if isinstance(epoch, int) and epoch < self.epoch:
                self._tell_epoch(rank)
        elif kind in ("ask", "want", "unheard", "leave"):
            self._has_begun(rank)
            self._hear_in_epoch(now, rank, message)

    def _hear_in_epoch(self, now: float, rank: int, message: Mapping[str, Any]) -> None:
        """Take a message of a member that has begun this epoch."""
        kind = message.get("is")
        if kind == "ask":
            self._tell_state(rank)
        elif kind == "want":
            self._want(rank, message.get("admit"))
        elif kind == "unheard":
            peers = self.live.intersection(_ranks(message.get("peers"))) - {rank}
            before = self._pairs.pop(rank, {})
            if peers:
                self._pairs[rank] = {peer: [before.get(peer, [now])[0], now] for peer in peers}
        elif kind == "leave":
            self.left.add(rank)
            self._tell_state(rank)
            self._advance()

    def beat(self, now: float, rank: int, begun: bool = True) -> bool:
        """A beat of a member has come; return whether the head answers and renews the lease.

        `begun`: the rank has a lease of a keep-alive time, and no longer the lease of a start.
        """
        if rank not in self.live or rank in self.fenced:
            return False
        if now - self._answered.get(rank, now) > GATHER * self._keep_alive:
            self._forget_pairs(rank)  # it stood still, or was cut off, and is back
        self._answered[rank] = now
        if begun:
            self._leased.add(rank)
        if begun and self.epoch == 1:
            self._has_begun(rank)
        return True

    def _has_begun(self, rank: int) -> None:
        """Note that a rank knows the epoch, and has its connections."""
        if rank not in self._begun:
            self._begun.add(rank)
            self._forget_pairs(rank)

    def _forget_pairs(self, rank: int) -> None:
        self._pairs.pop(rank, None)
        for peers in self._pairs.values():
            peers.pop(rank, None)

    def news(self) -> int:
        """The number of the state told to members, larger after every change."""
        if (state := [self.epoch, self._state()]) != self._state_before:
            self._news, self._state_before = self._news + 1, state
        return self._news

    def hear_of_deaths(self, now: float, ranks: Any) -> None:
        """Take the watcher's word, said a few times: processes of ranks that joined live on."""
        self.died(now, {rank for rank in _ranks(ranks) if not self._lives.get(rank)})

    def died(self, now: float, ranks: Collection[int]) -> None:
        """The death of these ranks is certain."""
        self._now = now
        new = self.live.intersection(ranks) - self.dead
        self.dead |= new
        self.fenced |= new
        if new:
            self._revoke()
            self._advance()

    def tick(self, now: float) -> None:
        """Time has passed: leases end, and pairs of hosts that do not hear each other are cut."""
        self._now = now
        self._look_for_missing()
        late = HEAD_PATIENCE * self._keep_alive
        at_start = HEAD_PATIENCE * max(self._keep_alive, START_KEEP_ALIVE)
        silent = {
            rank
            for rank, last in self._answered.items()
            if rank in self.live - self.dead - self.left
            and now > last + (late if rank in self._leased else at_start)
        }
        for rank in sorted(silent - self.fenced):
            self.lines.append(
                f"host {self._hosts[rank]}: rank {rank} is given up: nothing was heard for "
                f"{now - self._answered[rank]:.1f} s"
            )
        self.died(now, silent)
        gone, fresh = self.fenced | self.left, now - FORGOTTEN * self._keep_alive
        self._pairs = {
            rank: {
                peer: times
                for peer, times in peers.items()
                if times[1] > fresh and peer not in gone
            }
            for rank, peers in self._pairs.items()
            if rank not in gone
        }
        first = min(
            (times[0] for peers in self._pairs.values() for times in peers.values()), default=now
        )
        if now - first >= GATHER * self._keep_alive:
            self._choose()

    def _look_for_missing(self) -> None:
        """Tell once of ranks that have not joined long after others, at the start."""
        if self._now < self._first_join + LATE_SECONDS:
            return
        self._first_join, self._told_missing = math.inf, True
        missing = sorted(self.live - self.dead - set(self._places))
        if missing and self.epoch == 1:
            hosts = ", ".join(dict.fromkeys(self._hosts[rank] for rank in missing))
            self.lines.append(
                f"{named('rank', missing)} on {hosts}: not heard, though others have waited for "
                f"{LATE_SECONDS:.0f} s"
            )

    def next(self) -> float:
        """The longest time until the next `tick`, in seconds."""
        return min(0.05 * self._keep_alive, REPEAT_SECONDS)

    def take(self) -> list[tuple[int, Message]]:
        """The messages to send, (rank, message), taken out of the outbox."""
        out, self.outbox = self.outbox, {}
        return [(rank, message) for (rank, *_), message in out.items()]

    def _enter(self, rank: int, life: str, message: Mapping[str, Any]) -> None:
        if life == self._lives.get(rank) and rank in self.live:
            self._tell_epoch(rank)  # the word on the epoch was lost
        elif life == self._lives.get(rank):
            self._say(rank, "fence", life)
        elif rank in self._departed:
            self._say(rank, "bye", life)
        else:
            there = self._waiting.get(rank)
            if there is not None and there.life != life and self._waits(there):
                self._say(rank, "taken", life, host=there.host)
                return
            if there is None or there.life != life:
                self._newcomers += 1
                host, at = str(message.get("host")), message.get("at")
                self._waiting[rank] = there = Newcomer(life, host, at, self._newcomers)
            elif message.get("number") == there.number:
                there.heard = self._now
            lives = rank in self.live - self.dead
            self._say(rank, "wait", life, lives=lives, number=there.number)

    def _waits(self, newcomer: Newcomer) -> bool:
        """Whether a newcomer still waits, as far as heard."""
        return self._now - newcomer.heard < max(ENTER_PATIENCE, 0.5 * self._keep_alive)

    def _ready(self) -> list[int]:
        """The newcomers that the next epoch can admit."""
        over = self._now - HEAD_PATIENCE * self._keep_alive
        return sorted(
            rank
            for rank, newcomer in self._waiting.items()
            if rank not in self.live
            and self._waits(newcomer)
            and self._answered.get(rank, over) <= over
        )

    def _admit(self, rank: int) -> None:
        """Make a newcomer a member of the epoch about to begin."""
        newcomer = self._waiting.pop(rank)
        life, host, at = newcomer.life, newcomer.host, newcomer.at
        if host not in self._names:
            self._names.append(host)
        self._hosts[rank], self._place[rank] = host, self._names.index(host)
        self._lives[rank], self._places[rank], self._answered[rank] = life, at, self._now
        self._joins[rank] += 1
        self.joined[self._place[rank]] = self.epoch
        self._leased.add(rank)

    def _tell_epoch(self, rank: int) -> None:
        """Tell a member of the present epoch; after a join also the places of all members."""
        more: dict[str, Any] = {}
        if self._lives:
            places = [self._places.get(each) for each in range(len(self._hosts))]
            more = {"at": places, "beats": self._joins[rank] << 32}
        self._say(rank, "new", live=sorted(self.live), **more)

    def _join(self, now: float, rank: int, at: Any) -> None:
        self._answered.setdefault(rank, now)  # its lease began before
        new, self._places[rank] = rank not in self._places, at
        if not self._told_missing:
            self._first_join = min(self._first_join, now)
        if self.live - self.dead <= set(self._places):
            everybody = [self._places.get(each) for each in range(len(self._hosts))]
            for each in sorted(self.live - self.dead) if new else [rank]:
                self._say(each, "world", at=everybody)

    def _tell_state(self, rank: int) -> None:
        self._say(rank, "state", news=self.news(), **self._state())

    def _state(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "dead": sorted(self.dead),
            "left": sorted(self.left),
            "revoked": bool(self._wanting or self.fenced),
        }
        if waiting := self._ready():
            fields["waiting"] = waiting
        if self.stop is not None:
            fields["stop"] = self.stop
        return fields

    def _want(self, rank: int, admit: Any) -> None:
        first = not self._wanting
        self._wanting.add(rank)
        self._admitting[rank] = admit if isinstance(admit, int) else Admit.NO
        if first:
            self._revoke()
        self._advance()

    def _revoke(self) -> None:
        """Tell the members in calls. A lost message is made up for by their looks (`ask`)."""
        for rank in sorted(self.live - self._wanting - self.fenced - self.left):
            self._say(rank, "revoke")

    def _advance(self) -> None:
        """Begin the next epoch, if all who are to go on want it, and all others are gone."""
        if not self.fenced <= self.dead:
            return
        staying = self.live - self.dead - self.left
        if not self._wanting or not staying <= self._wanting:
            return
        self._departed |= self.left
        wishes = {self._admitting.get(rank, Admit.NO) for rank in staying}
        admits = Admit.NO not in wishes and Admit.ASKS in wishes
        newcomers = self._ready() if admits else []
        for rank in newcomers:
            self._admit(rank)
        self.live = staying.union(newcomers)
        self.epoch += 1
        self.dead, self.fenced, self.left = set(), set(), set()
        self._wanting, self._admitting, self._pairs, self._begun = set(), {}, {}, set()
        for rank in sorted(self.live):
            self._tell_epoch(rank)

    def _choose(self) -> None:
        pairs = {
            (min(pair), max(pair))
            for pair in (
                (self._place[rank], self._place[peer])
                for rank, peers in self._pairs.items()
                for peer, (first, last) in peers.items()
                # not on a few reports: the link may be up again
                if last - first >= LASTING * unheard_pause(self._keep_alive)
                and self._hears(rank)
                and self._hears(peer)
            )
        }
        if not pairs:
            return
        for place in sorted(chosen(pairs, self.joined)):
            one, other = (self._names[end] for end in min(p for p in pairs if place in p))
            host = self._names[place]
            apart = (
                f"ranks of host {one} do not hear each other"
                if one == other
                else f"hosts {one} and {other} do not hear each other"
            )
            self.lines.append(f"{apart}, though this machine hears both: host {host} is given up")
            # ranks that have left beat no more: their end would never be known
            staying = self.live - self.dead - self.left
            gone = {rank for rank in staying if self._place[rank] == place}
            self.fenced |= gone
            for rank in sorted(gone):
                self._say(rank, "fence")
        self._pairs = {}
        self._revoke()
        self._advance()

    def _hears(self, rank: int) -> bool:
        """Whether the head has had a beat of a rank not long ago, and a word of this epoch."""
        heard = self._now - self._answered.get(rank, 0.0) < HEARD * self._keep_alive
        return heard and rank in self._begun

    def _say(self, rank: int, kind: str, life: str | None = None, **fields: Any) -> None:
        life = self._lives.get(rank, "") if life is None else life
        more = {"life": life} if life else {}
        self.outbox[rank, life, kind] = {"is": kind, "epoch": self.epoch, **more, **fields}


class Phase(Enum):
    """The phases of a member."""

    JOINING = "join"
    ENTERING = "enter"
    LIVE = "ask"
    WANTING = "want"
    LEAVING = "leave"


class Member:
    """One rank's knowledge of the run. `due` gives the messages to send."""

    def __init__(
        self,
        rank: int,
        at: Sequence[Any],
        life: str = "",
        host: str = "",
    ) -> None:
        """`at` is the place where this rank listens, for the other ranks.

        A process that joins a run under way has a `life`, and the name of its `host`.
        """
        self.rank, self._at = rank, list(at)
        self._life, self._host = life, host
        self._next = 0.0
        self.reported: tuple[int, ...] = ()
        """The ranks of the last report of unheard ranks."""
        self._takings_back = 0
        self._pause = REPEAT_SECONDS
        self._news, self._told_news = 0, math.inf
        self.phase = Phase.ENTERING if life else Phase.JOINING
        self.epoch = 1
        self.live: tuple[int, ...] = ()
        self.places: list[Any] = []
        """The place of each rank, known once the member is LIVE; `None` for a dead rank."""
        self.waiting = False
        """Whether ranks wait to join."""
        self.stop: Any = None
        """The signal by which the head asks to stop, if any."""
        self.told = ""
        """The last word of the head to a newcomer, with more words on the reason of a wait."""
        self.beats = 0
        """The number below the numbers of this process's beats."""
        self._number: Any = None
        self._new: Message | None = None
        self._admit = Admit.NO
        self.revoked = self.fenced = self._released = False
        self.dead: frozenset[int] = frozenset()
        self.left: frozenset[int] = frozenset()

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take a message of the head. A late message has no effect."""
        kind, epoch = message.get("is"), int(message["epoch"])
        if message.get("life", "") != self._life:
            return
        if kind in ("wait", "taken", "bye") and self.phase is Phase.ENTERING:
            if message.get("number") != self._number:
                self._number, self._next = message.get("number"), 0.0  # said at once
            lives = kind == "wait" and message.get("lives")
            self.told = "lives" if lives else kind
        elif kind == "fence":
            self.fenced = True
        elif kind == "bye":
            self._released = True
        elif kind == "world" and self.phase is Phase.JOINING:
            self.phase, self.places = Phase.LIVE, message["at"]
            self.live = tuple(range(len(self.places)))
        elif kind == "new" and epoch > self.epoch:
            # in a call or in a shrink: the epoch begins once the program has left its call
            self._new = dict(message)
            self.revoked = True
        elif epoch == self.epoch and kind == "revoke":
            self.revoked = True
        elif epoch == self.epoch and kind == "state":
            self.revoked = self.revoked or message["revoked"]
            self.dead, self.left = frozenset(message["dead"]), frozenset(message["left"])
            self.waiting = bool(message.get("waiting"))
            self.stop = message.get("stop")
            self._news = max(self._news, message.get("news", 0))

    def know_news(self, number: float) -> None:
        """The head has answered a beat with this number of its state.

        From then on the member asks for the state only after news. Before, the member asks again
        and again.
        """
        if number != self._told_news:
            self._told_news = number
            self._at_once()

    def want(self, admit: Admit = Admit.NO) -> None:
        """This rank has left its calls and wants the next epoch.

        The epoch has the ranks that wait, if a member asks so and all other members admit ranks.
        """
        if self.phase is not Phase.WANTING:
            self.phase, self._admit = Phase.WANTING, admit
            self._at_once()

    def begun(self) -> bool:
        """Whether the next epoch has begun; a member that wants the epoch is in it then."""
        if self._new is None or self.phase not in (Phase.WANTING, Phase.ENTERING):
            return False
        new, self._new = self._new, None
        self.epoch, self.live = int(new["epoch"]), tuple(new["live"])
        self.places = new.get("at", self.places)
        self.beats = new.get("beats", 0)
        self.phase, self.revoked, self.waiting = Phase.LIVE, False, False
        self.reported, self._takings_back = (), 0
        self.dead = self.left = frozenset()
        return True

    def leave(self) -> None:
        """This rank leaves on purpose."""
        self.phase = Phase.LEAVING
        self._at_once()

    def all_left(self) -> bool:
        """Whether every member has left, or is dead."""
        return self._released or (
            self.phase is Phase.LEAVING and set(self.live) <= self.left | self.dead
        )

    def due(self, now: float, unheard: Collection[int] | None = None) -> list[Message]:
        """The messages to send now; `unheard` are the ranks without a byte for too long.

        `None`: nobody has looked. Looks without unheard ranks take a report back, a few times,
        since a message may be lost.
        """
        said: list[Message] = []
        if unheard is not None and (unheard or self._takings_back):
            self._takings_back = TAKINGS_BACK if unheard else self._takings_back - 1
            self.reported = tuple(sorted(unheard))
            said.append(self._message("unheard", peers=list(self.reported)))
        knows = self.phase is Phase.LIVE and self._told_news <= self._news
        if now >= self._next and not knows:
            longest = {
                Phase.JOINING: LONGEST_JOIN_PAUSE,
                Phase.LEAVING: REPEAT_SECONDS,
            }.get(self.phase, ASK_SECONDS)
            self._next = now + min(self._pause, longest)
            self._pause = min(2 * self._pause, longest)
            more: dict[Phase, dict[str, Any]] = {
                Phase.JOINING: {"at": self._at},
                Phase.ENTERING: {"at": self._at, "host": self._host, "number": self._number},
                Phase.WANTING: {"admit": int(self._admit)},
            }
            said.append(self._message(self.phase.value, **more.get(self.phase, {})))
        return said

    def _at_once(self) -> None:
        """Have the next `due` say what is to be said."""
        self._next, self._pause = 0.0, REPEAT_SECONDS

    def _message(self, kind: str, **fields: Any) -> Message:
        life = {"life": self._life} if self._life else {}
        return {"is": kind, "rank": self.rank, "epoch": self.epoch, **life, **fields}


def _ranks(value: Any) -> set[int]:
    """The ranks of a list in a message; empty for anything else."""
    return {rank for rank in value if isinstance(rank, int)} if isinstance(value, list) else set()

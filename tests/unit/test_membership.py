"""Membership: epochs, leases and fences, with datagrams that are lost, late, doubled, reordered."""

from __future__ import annotations

import copy
import heapq
import itertools
import time
from random import Random
from typing import Any

import pytest

from ecrm.transport.membership import (
    HEAD_PATIENCE,
    START_KEEP_ALIVE,
    Admit,
    Head,
    Member,
    Phase,
    chosen,
    unheard_pause,
)

KEEP_ALIVE = 2.0
LEASE = 0.8 * KEEP_ALIVE


class Run:
    """A head and its members in virtual time, with a network that loses and delays."""

    def __init__(self, hosts: list[str], seed: int = 0, loss: float = 0.0) -> None:
        self.draw, self.loss, self.now = Random(seed), loss, 0.0
        self.hosts = hosts
        self.head = Head(hosts, KEEP_ALIVE)
        self.members = {rank: Member(rank, ["10.0.0.1", rank]) for rank in range(len(hosts))}
        self.alive = set(self.members)
        self.died_at: dict[int, float] = {}
        self.epochs: dict[int, tuple[int, ...]] = {}
        self.began: dict[int, float] = {}
        self.lease = dict.fromkeys(self.members, 0.0)
        self.news: dict[int, int] = {}
        self.deaf: set[int] = set()
        """Ranks cut off from the head."""
        self.parted: set[frozenset[str]] = set()
        """Pairs of hosts that do not hear each other."""
        self.parted_since: dict[frozenset[str], float] = {}
        self.lives: dict[int, list[float]] = {}
        """The times at which processes wanted to be a rank again."""
        self._events: list = []
        self._count = itertools.count()
        for rank in self.members:
            self._later(0.0, self._act, rank)
            self._later(0.0, self._beat, rank)
        self._later(0.0, self._tick)

    def _later(self, seconds: float, what, *arguments) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._count), what, arguments))

    def _network(self, rank: int, what, *arguments) -> None:
        """A datagram between a rank and the head: perhaps lost, perhaps doubled, always late."""
        for _ in range(2 if self.draw.random() < 0.1 else 1):
            if rank not in self.deaf and self.draw.random() >= self.loss:
                self._later(self.draw.random() * 0.03, what, *arguments)

    def _act(self, rank: int) -> None:
        """A turn of a member's process."""
        member = self.members[rank]
        if rank not in self.alive:
            return
        if member.fenced or self.now > self.lease[rank] + LEASE:
            self.kill(rank)
            return
        enters = member.phase is Phase.ENTERING
        if member.phase is Phase.LIVE and member.revoked:
            member.want(Admit.MAY)
        elif member.phase is Phase.LIVE and member.waiting:
            member.want(Admit.ASKS)  # as after a commit
        elif member.phase in (Phase.WANTING, Phase.ENTERING):
            if not enters:
                member.want()
            if member.begun():
                if enters:
                    self.lease[rank] = self.now
                    self._later(0.0, self._beat, rank)
                assert self.epochs.setdefault(member.epoch, member.live) == member.live
                self.began.setdefault(member.epoch, self.now)
        unheard = [
            other
            for other in member.live
            if (pair := frozenset((self.hosts[rank], self.hosts[other]))) in self.parted
            and self.now - self.parted_since[pair] > KEEP_ALIVE
        ]
        for message in member.due(self.now, unheard):
            self._network(rank, self._to_head, message)
        self._later(0.005 + self.draw.random() * 0.01, self._act, rank)

    def _beat(self, rank: int) -> None:
        if rank in self.alive:
            self._network(rank, self._beat_arrives, rank, self.now)
            self._later(0.05 * KEEP_ALIVE, self._beat, rank)

    def _beat_arrives(self, rank: int, sent: float) -> None:
        if self.head.beat(self.now, rank):
            self._network(rank, self._renew, rank, sent, self.head.news())

    def _renew(self, rank: int, sent: float, news: int) -> None:
        self.lease[rank] = max(self.lease[rank], sent)
        self.news[rank] = max(self.news.get(rank, 0), news)
        self.members[rank].know_news(self.news[rank])

    def _to_head(self, message: dict) -> None:
        self.head.hear(self.now, message)
        self._send()

    def _tick(self) -> None:
        self.head.tick(self.now)
        self._send()
        self._later(self.head.next(), self._tick)

    def _send(self) -> None:
        for rank, message in self.head.take():
            self._network(rank, self._to_member, rank, message)

    def _to_member(self, rank: int, message: dict) -> None:
        if rank in self.alive:
            self.members[rank].hear(message)

    def kill(self, rank: int) -> None:
        self.alive.discard(rank)
        self.died_at.setdefault(rank, self.now)

    def comes_back(self, rank: int, life: str) -> None:
        """A new process wants to be a rank."""
        self.members[rank] = Member(rank, ["10.0.0.2", rank], life=life, host=self.hosts[rank])
        self.lives.setdefault(rank, []).append(self.now)
        self.alive.add(rank)
        self.lease[rank] = self.now + 1e6  # begins with the epoch
        self._later(0.0, self._act, rank)

    def watcher_tells(self, dead: int) -> None:
        """The head hears of the death a little later."""
        self._later(self.draw.random() * 0.01, self._told, dead)

    def _told(self, dead: int) -> None:
        self.head.died(self.now, [dead])
        self._send()

    def part(self, one: str, other: str) -> None:
        self.parted.add(frozenset((one, other)))
        self.parted_since[frozenset((one, other))] = self.now

    def run(self, until, seconds: float) -> float:
        """Let time pass until true; returns the seconds that it took."""
        began = self.now
        while not until():
            assert self.now - began < seconds, f"not within {seconds} s: {self.head.__dict__}"
            self.now, _, what, arguments = heapq.heappop(self._events)
            what(*arguments)
        return self.now - began

    def all_in(self, epoch: int, live: set[int]) -> bool:
        return all(
            self.members[rank].epoch >= epoch
            and self.members[rank].phase is Phase.LIVE
            and set(self.members[rank].live) == live
            for rank in live
        )

    def check(self) -> None:
        """No epoch has begun before those that are not in it were dead."""
        everybody = set(self.members)
        for epoch, live in self.epochs.items():
            for rank in everybody - set(live):
                assert self.died_at[rank] <= self.began[epoch], (epoch, rank)


HOSTS = ["h1", "h2", "h3", "h1", "h2", "h3"]


def joined(hosts: list[str], seed: int = 0, loss: float = 0.0) -> Run:
    run = Run(hosts, seed, loss)
    run.run(lambda: run.all_in(1, set(range(len(hosts)))), 5.0)
    assert run.members[0].places == [["10.0.0.1", rank] for rank in range(len(hosts))]
    return run


def reported(head: Head, first: float, last: float, peers: list[int]) -> None:
    """Rank 0 reports ranks from `first` to `last`, while all ranks beat."""
    for tenth in range(round(10 * first), round(10 * last) + 1):
        for rank in range(3):
            head.beat(0.1 * tenth, rank)
        unheard = {"is": "unheard", "rank": 0, "epoch": 1, "peers": peers}
        head.hear(0.1 * tenth, unheard)
        head.tick(0.1 * tenth)


def three_hosts() -> Head:
    head = Head(["h1", "h2", "h3"], KEEP_ALIVE)
    for rank in range(3):
        head.hear(0.0, {"is": "join", "rank": rank, "epoch": 1, "at": ["10.0.0.1", rank]})
        head.beat(0.0, rank)
        head.hear(0.0, {"is": "ask", "rank": rank, "epoch": 1})
    return head


def test_a_rank_that_is_heard_again_is_taken_back() -> None:
    """A pair is chosen a quarter of the keep-alive time after its first report."""
    cut, healed, other = three_hosts(), three_hosts(), three_hosts()
    reported(cut, 1.0, 1.5, [1])
    assert cut.fenced == {1}
    reported(healed, 1.0, 1.4, [1])
    reported(healed, 1.4, 1.6, [])
    assert healed.fenced == set()
    reported(other, 1.0, 1.4, [1, 2])
    reported(other, 1.4, 1.6, [2])
    assert other.fenced == {2}


def test_one_rank_of_two_that_hears_nothing_is_enough() -> None:
    """Long frames of rank 1 are lost, all others arrive: rank 1 reports nobody."""
    head = Head(["h1", "h2"], KEEP_ALIVE)
    for rank in range(2):
        head.hear(0.0, {"is": "join", "rank": rank, "epoch": 1, "at": ["10.0.0.1", rank]})
    for tenth in range(11):
        for rank in range(2):
            head.beat(0.1 * tenth, rank)
        if tenth > 2:
            unheard = {"is": "unheard", "rank": 0, "epoch": 1, "peers": [1]}
            head.hear(0.1 * tenth, unheard)
        head.tick(0.1 * tenth)
    assert head.fenced == {1}


def test_a_report_of_a_rank_costs_the_head_little_among_many_ranks() -> None:
    """One host of 14 is cut off, with 72 ranks each: a report does not pass over all pairs."""
    hosts = [f"h{rank % 14}" for rank in range(14 * 72)]
    head = Head(hosts, KEEP_ALIVE)
    cut = [rank for rank, host in enumerate(hosts) if host == "h3"]
    others = [rank for rank, host in enumerate(hosts) if host != "h3"]
    head.hear(0.0, {"is": "join", "rank": 0, "epoch": 1, "at": ["10.0.0.1", 1]})
    began, taken = time.process_time(), 0
    for rank in (*cut, *others):
        peers = others if rank in cut else cut
        head.hear(0.1, {"is": "unheard", "rank": rank, "epoch": 1, "peers": peers})
        taken += 1
    assert (time.process_time() - began) / taken < 1e-3


def test_a_host_that_stood_still_is_not_given_up_when_it_wakes() -> None:
    """The others have reported it, and its first beat makes it a rank that the head hears."""
    head = three_hosts()
    reports = {"is": "unheard", "epoch": 1, "peers": [1]}
    for tenth in range(1, 17):
        for rank in (0, 2):
            head.beat(0.1 * tenth, rank)
            if tenth >= 10:
                head.hear(0.1 * tenth, {**reports, "rank": rank})
        if tenth == 14:
            head.beat(1.4, 1)
        head.tick(0.1 * tenth)
    assert head.fenced == set()


def test_a_member_takes_its_reports_back_a_few_times() -> None:
    member = Member(0, ["10.0.0.1", 1])
    member.hear({"is": "world", "epoch": 1, "at": [["10.0.0.1", 1]] * 2})

    def told(unheard: list[int] | None) -> list[list[int]]:
        return [each["peers"] for each in member.due(1.0, unheard) if each["is"] == "unheard"]

    assert told([]) == [] and member.reported == ()
    assert told([1]) == [[1]] and told(None) == [] and member.reported == (1,)
    assert [told([]) for _ in range(4)] == [[[]], [[]], [[]], []]
    assert member.reported == ()


def test_hosts_that_report_a_host_one_after_another_do_not_cost_two_hosts() -> None:
    """The last bytes of a host come at other times to each host: here 0.14 T apart."""
    head = three_hosts()
    for hundredth in range(100, 200):
        now = 0.01 * hundredth
        for rank in range(3):
            head.beat(now, rank)
        for rank, first in ((2, 1.0), (0, 1.0 + 0.14 * KEEP_ALIVE)):
            if now >= first and round(100 * (now - first)) % 8 == 0:
                head.hear(now, {"is": "unheard", "rank": rank, "epoch": 1, "peers": [1]})
        head.tick(now)
        if head.fenced:
            break
    assert head.fenced == {1}


def test_ranks_that_do_not_join_are_told_of_once():
    head = Head(["h1", "h1", "h2"], KEEP_ALIVE)
    head.hear(1.0, {"is": "join", "rank": 0, "epoch": 1, "at": ["10.0.0.1", 1]})
    for now in range(2, 100):
        head.beat(now, 0)
        head.hear(now, {"is": "join", "rank": 0, "epoch": 1, "at": ["10.0.0.1", 1]})
        head.tick(now)
        assert head.lines == [] or now >= 31
    assert head.lines == ["ranks 1, 2 on h1, h2: not heard, though others have waited for 30 s"]


@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_deaths_lead_to_epochs_that_all_survivors_have_alike(seed: int, loss: float) -> None:
    run = joined(HOSTS, seed, loss)
    left = set(range(6))
    for dead in run.draw.sample(range(6), 4):
        left.discard(dead)
        run.kill(dead)
        run.watcher_tells(dead)
        epoch = run.head.epoch + 1
        took = run.run(lambda: run.all_in(epoch, left), 5.0)
        assert took < (0.2 if loss == 0 else 3.0)
    assert run.alive == left
    run.check()


def test_two_deaths_at_once_are_one_epoch_and_a_later_one_is_not_forgotten() -> None:
    run = joined(HOSTS)
    for dead in (1, 2):
        run.kill(dead)
        run.watcher_tells(dead)
    run._later(0.005, run.kill, 3)
    run._later(0.006, run.watcher_tells, 3)
    run.run(lambda: run.all_in(2, {0, 4, 5}), 2.0)
    assert run.head.epoch <= 3
    run.check()


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_a_rank_cut_off_from_the_head_is_dead_before_the_others_go_on(loss: float) -> None:
    run = joined(HOSTS, 1, loss)
    run.deaf = {2, 5}
    took = run.run(lambda: run.all_in(2, {0, 1, 3, 4}), 5.0)
    assert LEASE < took < 1.2 * KEEP_ALIVE
    assert run.alive == {0, 1, 3, 4}
    run.check()
    assert any("rank 2 is given up: nothing was heard for 2." in line for line in run.head.lines)


def test_loss_and_delay_cost_no_member() -> None:
    run = joined(HOSTS, 3, 0.3)
    end = run.now + 60.0
    run.run(lambda: run.now > end, 61.0)
    assert run.alive == set(range(6)) and run.head.epoch == 1 and run.head.lines == []


@pytest.mark.parametrize("seed", range(3))
def test_of_two_hosts_that_do_not_hear_each_other_one_is_fenced(seed: int) -> None:
    run = joined(HOSTS, seed, 0.1)
    run.part("h1", "h2")
    took = run.run(lambda: run.all_in(2, {0, 2, 3, 5}), 8.0)
    assert took < 2.5 * KEEP_ALIVE
    run.check()
    assert run.head.lines[0].endswith("host h2 is given up")


def test_a_fence_does_not_wait_for_ranks_of_the_host_that_have_left() -> None:
    run = joined(["h1", "h2", "h2"])
    run.members[1].leave()
    run.run(lambda: 1 in run.head.left, 1.0)
    run.part("h1", "h2")
    run.run(lambda: run.all_in(2, {0}), 8.0)
    assert 2 not in run.alive and run.head.lines[0].endswith("host h2 is given up")


def test_the_host_in_most_unheard_pairs_is_fenced() -> None:
    run = joined(HOSTS)
    run.part("h1", "h2")
    run.part("h1", "h3")
    run.run(lambda: run.all_in(2, {1, 2, 4, 5}), 8.0)
    run.check()


def test_a_fenced_rank_that_hears_nothing_is_waited_for() -> None:
    """The fence is lost on the way: the head waits until the lease is over."""
    run = joined(HOSTS)
    run.part("h1", "h2")
    run.run(lambda: run.head.fenced, 5.0)
    fenced_at = run.now
    run.deaf = {1, 4}
    run.run(lambda: run.all_in(2, {0, 2, 3, 5}), 5.0)
    assert run.now - fenced_at > LEASE - 0.2
    run.check()


def test_without_the_wait_others_would_go_on_beside_a_living_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The twin: a head that does not wait for the lease."""
    monkeypatch.setattr("ecrm.transport.membership.HEAD_PATIENCE", 0.1)
    run = joined(HOSTS)
    run.deaf = {2, 5}
    run.run(lambda: run.all_in(2, {0, 1, 3, 4}), 5.0)
    with pytest.raises((AssertionError, KeyError)):
        run.check()
    assert HEAD_PATIENCE * KEEP_ALIVE > LEASE


def test_a_pair_that_hears_again_is_forgotten() -> None:
    run = joined(HOSTS)
    run.part("h1", "h2")
    run.parted_since[frozenset(("h1", "h2"))] -= KEEP_ALIVE
    run.run(lambda: any(run.head._pairs.values()), 1.0)
    run.parted.clear()
    end = run.now + 3 * KEEP_ALIVE
    run.run(lambda: run.now > end, 10.0)
    assert run.head.epoch == 1 and run.alive == set(range(6))


@pytest.mark.parametrize("keep_alive", [0.5, 1.0, 2.0, 10.0])
def test_a_link_that_healed_before_the_choice_costs_no_host(keep_alive: float) -> None:
    """A pair reported for a moment is none; a pair reported until the choice is chosen."""

    def fenced_after_reports_for(seconds: float) -> set[int]:
        head = joined_head(2, keep_alive)
        for tick in range(int(100 * keep_alive)):
            now = 0.01 * tick
            if now < seconds and tick % max(1, int(100 * unheard_pause(keep_alive))) == 0:
                head.hear(now, {"is": "unheard", "rank": 0, "epoch": 1, "peers": [1]})
            head.beat(now, 0)
            head.beat(now, 1)
            head.tick(now)
        return head.fenced

    assert fenced_after_reports_for(1.5 * unheard_pause(keep_alive)) == set()
    assert fenced_after_reports_for(keep_alive) == {1}


def test_a_pair_reported_once_is_not_chosen_beside_another() -> None:
    head = joined_head(4)
    for now, rank, peer in ((0.0, 0, 1), (0.3, 0, 1), (0.49, 2, 3), (0.55, 0, 1)):
        head.hear(now, {"is": "unheard", "rank": rank, "epoch": 1, "peers": [peer]})
        head.tick(now)
    assert head.fenced == {1}


@pytest.mark.parametrize("dead", [0, 1])
def test_of_two_hosts_the_living_one_is_not_given_up_for_its_pair_with_the_dead_one(
    dead: int,
) -> None:
    """The pair is reported for long enough before the lease of the dead host is over."""

    def fenced_beside(silent: int | None) -> set[int]:
        head, now = joined_head(2, 30.0), 0.0
        while now < 30.0:
            for rank in {0, 1} - {silent}:
                head.beat(now, rank)
                if now > 16.0:
                    head.hear(now, {"is": "unheard", "rank": rank, "epoch": 1, "peers": [1 - rank]})
            head.tick(now)
            if head.fenced:
                break
            now += 0.1
        assert now > 23.5
        return head.fenced

    assert fenced_beside(None) == {1}
    assert fenced_beside(dead) == set()


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_rank_that_has_not_heard_of_the_epoch_is_not_given_up(epoch: int) -> None:
    """The word of the head was lost: the rank refuses connections meanwhile."""
    head = joined_head(3)
    for each in range(1, epoch):
        for rank in range(3):
            head.hear(0.0, {"is": "want", "rank": rank, "epoch": each})
    assert head.epoch == epoch
    if epoch == 1:
        head._begun.clear()

    def fenced_after(words: list[dict]) -> set[int]:
        for tick in range(100):
            for rank in range(3):
                head.beat(0.02 * tick, rank, begun=epoch > 1)
            for message in words:
                head.hear(0.02 * tick, message | {"epoch": epoch})
            head.tick(0.02 * tick)
        return head.fenced

    unheard = [{"is": "unheard", "rank": rank, "peers": [2]} for rank in (0, 1)]
    assert fenced_after(unheard) == set()
    assert fenced_after([*unheard, {"is": "ask", "rank": 2}]) == {2}


def test_a_member_asks_to_join_with_growing_pauses() -> None:
    member, asked = Member(0, ["10.0.0.1", 1]), []
    for tick in range(600):
        asked += [0.01 * tick] * len(member.due(0.01 * tick))
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0], abs=0.021)


def test_the_last_to_join_brings_the_places_to_all_and_no_answer_waits_twice() -> None:
    head = Head(["h1", "h2", "h3"], KEEP_ALIVE)
    for rank in (0, 1, 0, 2):
        assert head.take() == []
        head.hear(0.0, {"is": "join", "rank": rank, "epoch": 1, "at": ["10.0.0.1", rank]})
    assert [rank for rank, _ in head.take()] == [0, 1, 2]
    for _ in range(3):
        head.hear(0.0, {"is": "ask", "rank": 1, "epoch": 1})
    state = {"is": "state", "epoch": 1, "news": 0, "dead": [], "left": [], "revoked": False}
    assert head.take() == [(1, state)]


def test_members_leave_one_by_one_and_one_that_stays_goes_on() -> None:
    run = joined(["h1"] * 3)
    run.members[2].leave()
    run.run(lambda: 2 in run.members[0].left, 1.0)
    assert not run.members[2].all_left()
    for rank in (0, 1):
        run.members[rank].want()
    run.run(lambda: run.all_in(2, {0, 1}), 1.0)
    run.run(run.members[2].all_left, 1.0)
    assert not run.members[2].fenced
    for rank in (0, 1):
        run.members[rank].leave()
    run.run(lambda: run.members[0].all_left() and run.members[1].all_left(), 1.0)


def test_what_comes_late_or_is_no_message_has_no_effect() -> None:
    head = Head(["h1", "h2"], KEEP_ALIVE)
    for rank in (0, 1):
        head.hear(0.0, {"is": "join", "rank": rank, "at": ["10.0.0.1", 1]})
    head.hear(0.0, {"rank": 0, "is": "ask", "epoch": 1})
    head.take()
    before = copy.deepcopy(head.__dict__)
    for message in (
        {},
        {"rank": "0", "is": "want", "epoch": 1},
        {"rank": 7, "is": "want", "epoch": 1},
        {"rank": 0, "is": "nothing", "epoch": 1},
        {"rank": 0, "is": "want", "epoch": 5},
        {"rank": 0, "is": "unheard", "epoch": 1, "peers": 3},
        {"rank": 0, "is": "unheard", "epoch": 1, "peers": [0, 9, "x"]},
    ):
        head.hear(0.0, message)
    assert head.__dict__ == before
    head.died(0.0, [1])
    head.hear(0.0, {"rank": 0, "is": "want", "epoch": 1})
    assert (head.epoch, head.live) == (2, {0})
    head.take()
    head.hear(0.0, {"rank": 0, "is": "want", "epoch": 1})  # late
    assert head.epoch == 2
    assert head.take() == [(0, {"is": "new", "epoch": 2, "live": [0]})]
    head.hear(0.0, {"rank": 1, "is": "ask", "epoch": 1})
    assert head.take() == [(1, {"is": "fence", "epoch": 2})]


def joined_head(ranks: int, keep_alive: float = KEEP_ALIVE) -> Head:
    """A head at which all ranks have joined, a host each, with an empty outbox."""
    head = Head([f"h{rank}" for rank in range(ranks)], keep_alive)
    for rank in range(ranks):
        head.hear(0.0, {"is": "join", "rank": rank, "epoch": 1, "at": ["10.0.0.1", 1]})
    for rank in range(ranks):
        head.hear(0.0, {"is": "ask", "rank": rank, "epoch": 1})
    head.take()
    return head


def wants(head: Head, rank: int) -> None:
    head.hear(0.0, {"is": "want", "rank": rank, "epoch": 1})


def test_an_epoch_begins_once_all_members_want_it() -> None:
    head = joined_head(3)
    wants(head, 0)
    wants(head, 1)
    assert head.epoch == 1
    wants(head, 2)
    assert (head.epoch, head.live) == (2, {0, 1, 2})


def test_a_fenced_member_that_wanted_the_epoch_is_waited_for_all_the_same() -> None:
    head = joined_head(3)
    wants(head, 0)
    wants(head, 1)
    for now in (0.0, 0.3, 0.55):
        head.hear(now, {"is": "unheard", "rank": 0, "epoch": 1, "peers": [1]})
        head.tick(now)
    assert head.fenced == {1} and head.dead == set()
    assert not head.beat(0.6, 1), "its lease is not renewed"
    assert head.beat(0.6, 0)
    wants(head, 2)
    assert head.epoch == 1
    head.died(0.7, [1])
    assert (head.epoch, head.live) == (2, {0, 2})


def test_a_look_makes_up_for_a_lost_word_on_a_shrink() -> None:
    head, member = joined_head(2), Member(1, ["10.0.0.1", 1])
    member.hear({"is": "world", "epoch": 1, "at": [["10.0.0.1", 1]] * 2})
    wants(head, 0)
    head.take()  # lost
    assert not member.revoked
    (look,) = member.due(0.0)
    head.hear(0.1, look)
    for _, message in head.take():
        member.hear(message)
    assert member.revoked


def test_a_member_asks_for_the_state_only_after_news() -> None:
    """The twin: a member without answers to beats asks again and again."""
    head, member, alone = joined_head(3), Member(1, ["10.0.0.1", 1]), Member(2, ["10.0.0.1", 1])
    for each in (member, alone):
        each.hear({"is": "world", "epoch": 1, "at": [["10.0.0.1", 1]] * 3})
    member.know_news(head.news())
    assert [len(alone.due(0.1 * tick)) for tick in range(20)].count(1) > 5
    assert not any(member.due(0.1 * tick) for tick in range(20))
    head.hear(3.0, {"is": "leave", "rank": 0, "epoch": 1})
    member.know_news(head.news())
    (look,) = member.due(3.0)
    assert member.due(3.01) == [] and member.due(3.06), "the answer may be lost"
    head.hear(3.1, look)
    for rank, message in head.take():
        if rank == 1:
            member.hear(message)
    assert member.left == {0}
    assert not any(member.due(3.0 + 0.1 * tick) for tick in range(20))


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.died(1.0, [2]),
        lambda head: wants(head, 0),
        lambda head: setattr(head, "stop", 2),
        lambda head: [wants(head, rank) for rank in range(3)],
    ],
    ids=["death", "shrink", "stop", "epoch"],
)
def test_every_change_of_the_state_is_news_once(change) -> None:
    head = joined_head(3)
    before = head.news()
    change(head)
    assert before == 0 and head.news() == 1 and head.news() == 1


def test_a_member_that_never_beats_is_given_up_and_one_that_left_is_not() -> None:
    head = joined_head(3)
    assert head.beat(1.0, 2)
    head.hear(1.0, {"is": "leave", "rank": 2, "epoch": 1})
    assert head.beat(1.5, 0)
    head.tick(1.5 + 0.99 * KEEP_ALIVE)
    assert head.dead == set()
    head.tick(1.5 + 1.01 * KEEP_ALIVE)
    assert head.dead == {0}
    head.tick(1.01 * START_KEEP_ALIVE)
    assert head.dead == {0, 1}


def test_a_rank_without_an_epoch_has_more_time() -> None:
    """All ranks of a host load torch at the start, and a rank that waits gets little of the CPU."""
    head = joined_head(2)
    for now in (0.0, 0.9 * START_KEEP_ALIVE):
        assert head.beat(now, 0, begun=False) and head.beat(now, 1, begun=False)
        head.tick(now)
    assert head.dead == set()
    began = 0.9 * START_KEEP_ALIVE
    head.beat(began, 0, begun=True)
    head.tick(began + 1.01 * KEEP_ALIVE)
    assert head.dead == {0}


def test_a_late_word_on_an_epoch_does_not_begin_it_again() -> None:
    member = Member(0, ["10.0.0.1", 1])
    member.hear({"is": "world", "epoch": 1, "at": [["10.0.0.1", 1]] * 2})
    new = {"is": "new", "epoch": 2, "live": [0]}
    member.want()
    member.hear(new)
    assert member.begun() and (member.epoch, member.live) == (2, (0,))
    member.hear(new)
    assert not member.revoked
    member.want()
    assert not member.begun()


@pytest.mark.parametrize(
    ("pairs", "gone"),
    [
        ([], set()),
        ([(0, 1)], {1}),
        ([(0, 1), (0, 2)], {0}),
        ([(0, 1), (1, 2)], {1}),
        ([(0, 2), (0, 3), (1, 2), (1, 3)], {3, 2}),
        ([(0, 1), (2, 3)], {1, 3}),
        ([(1, 1)], {1}),
    ],
)
def test_as_few_hosts_as_can_be_are_given_up_the_last_first(pairs, gone):
    assert chosen(pairs) == gone


@pytest.mark.parametrize(
    ("pairs", "joined", "gone"),
    [
        ([(0, 1)], {0: 2}, {0}),
        ([(0, 1)], {0: 2, 1: 3}, {1}),
        ([(0, 1), (1, 2)], {0: 2}, {1}),
        ([(0, 1), (2, 3)], {2: 2}, {1, 2}),
    ],
)
def test_a_host_that_has_come_back_goes_before_a_host_with_rows(pairs, joined, gone):
    assert chosen(pairs, joined) == gone


def test_a_host_that_comes_back_over_a_cut_link_costs_no_other_host() -> None:
    run = joined(["h1", "h2", "h3"])
    run.kill(0)
    run.watcher_tells(0)
    run.run(lambda: run.all_in(2, {1, 2}), 4 * KEEP_ALIVE)
    run.comes_back(0, "again")
    run.run(lambda: run.all_in(3, {0, 1, 2}), 3 * KEEP_ALIVE)
    run.part("h1", "h3")
    run.run(lambda: run.all_in(4, {1, 2}), 4 * KEEP_ALIVE)
    assert run.alive == {1, 2}
    assert run.head.lines[-1].endswith("host h1 is given up")


@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_lost_ranks_come_back_one_after_another(seed: int, loss: float) -> None:
    run = joined(HOSTS, seed, loss)
    everybody = set(range(6))
    for number, rank in enumerate([2, 5, 2, 0, 2]):
        run.kill(rank)
        run.died_at[rank] = run.now
        if number == 0 or rank not in run.lives:
            run.watcher_tells(rank)  # of the first process only
        run.run(lambda: run.all_in(2, everybody - {rank}), 4 * KEEP_ALIVE)
        gone, epoch = run.now, run.head.epoch
        run.comes_back(rank, f"life {number}")
        run.run(lambda: run.all_in(epoch + 1, everybody), 6.0)
        assert run.now - gone < KEEP_ALIVE + 4.0
        assert all(member.places[rank] == ["10.0.0.2", rank] for member in run.members.values())
    assert run.head.live == everybody == run.alive
    end = run.now + 3 * KEEP_ALIVE
    run.run(lambda: run.now > end, 4 * KEEP_ALIVE)  # and stay
    assert run.head.live == everybody == run.alive


def enters(head: Head, now: float, enter: dict[str, Any]) -> None:
    """A newcomer says its first word, and the number of the answer."""
    head.hear(now, enter)
    number = head.outbox[enter["rank"], enter["life"], "wait"]["number"]
    head.hear(now, {**enter, "number": number})


def test_replayed_words_of_a_newcomer_that_is_gone_bring_no_ghost() -> None:
    """All its words again, in order: the number of its answer is of the past."""
    head = joined_head(2)
    head.died(0.0, [1])
    head.hear(0.0, {"is": "want", "rank": 0, "epoch": 1, "admit": 2})
    enter = {"is": "enter", "rank": 1, "life": "a", "host": "h1", "at": ["10.0.0.2", 1]}
    words = [enter, {**enter, "number": 1}]
    for word in words:
        head.hear(5.0, word)
    assert head._ready() == [1]
    head.hear(5.0, {"is": "gone", "rank": 1, "life": "a"})
    for word in words:
        head.hear(5.1, word)
    assert head._ready() == []
    head.hear(5.2, {"is": "want", "rank": 0, "epoch": 2, "admit": 2})
    assert head.live == {0}


def test_a_rank_that_lives_is_waited_for_and_a_second_newcomer_is_refused() -> None:
    head = joined_head(2)
    enter = {"is": "enter", "rank": 1, "life": "a", "host": "h1", "at": ["10.0.0.2", 1]}
    enters(head, 0.1, enter)
    wait = {"is": "wait", "epoch": 1, "life": "a", "lives": True, "number": 1}
    assert head.take() == [(1, wait)]
    head.hear(0.2, {**enter, "life": "b"})
    assert [message["is"] for _, message in head.take()] == ["taken"]
    for rank in (0, 1):
        head.hear(0.3, {"is": "want", "rank": rank, "epoch": 1, "admit": 2})
    assert head.live == {0, 1}
    assert "life" not in head.take()[0][1], "the old process goes on"
    head.hear(9.0, {**enter, "life": "b"})  # nothing was heard of the other for a while
    assert [message["is"] for _, message in head.take()] == ["wait"]


@pytest.mark.parametrize("admits", [(2, 2), (2, 1), (2, 0), (1, 1)])
def test_a_newcomer_joins_only_if_a_member_asks_and_no_member_objects(
    admits: tuple[int, int],
) -> None:
    head = joined_head(3)
    head.died(0.0, [2])
    for rank in (0, 1):
        head.hear(0.0, {"is": "want", "rank": rank, "epoch": 1, "admit": 2})
    assert (head.epoch, head.live) == (2, {0, 1})
    enter = {"is": "enter", "rank": 2, "life": "a", "host": "h9", "at": ["10.0.0.9", 2]}
    enters(head, 5.0, enter)
    head.hear(5.0, {"is": "ask", "rank": 0, "epoch": 2})
    assert [message.get("waiting") for _, message in head.take() if message["is"] == "state"] == [
        [2]
    ]
    joins = max(admits) == 2 and min(admits) > 0
    for rank, admit in enumerate(admits):
        head.hear(5.1, {"is": "want", "rank": rank, "epoch": 2, "admit": admit})
    assert (head.epoch, head.live) == (3, {0, 1, 2} if joins else {0, 1})
    told = {message["is"]: message for rank, message in head.take() if rank == 2}
    assert ("new" in told) == joins
    if joins:
        assert told["new"]["at"][2] == ["10.0.0.9", 2]
        assert told["new"]["beats"] == 1 << 32


def test_a_number_does_not_come_back_before_the_lease_of_the_dead_is_over() -> None:
    """A rank may live for a while after mpirun has told of its death."""
    head = joined_head(2)
    assert head.beat(1.0, 1)
    head.died(1.1, [1])
    head.hear(1.1, {"is": "want", "rank": 0, "epoch": 1, "admit": 2})
    enter = {"is": "enter", "rank": 1, "life": "a", "host": "h1", "at": ["10.0.0.2", 1]}
    for now, epoch, live in ((1.2, 2, {0}), (1.0 + 1.01 * KEEP_ALIVE, 3, {0, 1})):
        enters(head, now, enter)
        head.hear(now, {"is": "want", "rank": 0, "epoch": epoch, "admit": 2})
        assert (head.epoch, head.live) == (epoch + 1, live)


@pytest.mark.parametrize(("keep_alive", "patience"), [(KEEP_ALIVE, 1.0), (30.0, 15.0)])
def test_a_newcomer_that_says_nothing_is_gone_after_half_of_the_keep_alive_time(
    keep_alive: float, patience: float
) -> None:
    head = joined_head(2, keep_alive)
    head.died(0.0, [1])
    head.hear(0.0, {"is": "want", "rank": 0, "epoch": 1, "dead": [1], "admit": 2})
    enter = {"is": "enter", "rank": 1, "life": "a", "host": "h1", "at": ["10.0.0.2", 1]}
    enters(head, 100.0, enter)
    head.tick(100.0 + 0.99 * patience)
    assert head._ready() == [1]
    head.tick(100.0 + 1.01 * patience)
    assert head._ready() == []


@pytest.mark.parametrize(
    ("kind", "lives", "told"),
    [
        ("wait", True, "lives"),
        ("wait", False, "wait"),
        ("taken", False, "taken"),
        ("bye", False, "bye"),
    ],
)
def test_a_newcomer_knows_the_reason_of_its_wait(kind: str, lives: bool, told: str) -> None:
    member = Member(1, ["10.0.0.2", 1], life="a", host="h1")
    member.hear({"is": kind, "epoch": 1, "life": "a", "number": 1, "lives": lives})
    assert member.told == told


def test_words_of_an_earlier_process_of_a_rank_have_no_effect() -> None:
    head = joined_head(2)
    head.died(0.0, [1])
    head.hear(0.0, {"is": "want", "rank": 0, "epoch": 1, "admit": 2})
    enter = {"is": "enter", "rank": 1, "life": "a", "host": "h1", "at": ["10.0.0.2", 1]}
    enters(head, 5.0, enter)
    head.hear(5.0, {"is": "want", "rank": 0, "epoch": 2, "admit": 2})
    head.take()
    for late in (
        {"is": "want", "rank": 1, "epoch": 3},
        {"is": "leave", "rank": 1, "epoch": 3},
        {"is": "want", "rank": 0, "epoch": 1},
        {"is": "gone", "rank": 1, "epoch": 3, "life": "b"},
    ):
        head.hear(5.1, late)
        assert (head.epoch, head.live, head.dead) == (3, {0, 1}, set())
    assert (1, {"is": "fence", "epoch": 3}) in head.take(), "for the earlier process alone"
    member = Member(1, ["10.0.0.2", 1], life="a")
    member.hear({"is": "fence", "epoch": 3})
    assert not member.fenced
    head.hear(5.2, {"is": "gone", "rank": 1, "epoch": 3, "life": "a"})
    assert head.dead == {1}


def test_the_watchers_word_is_on_processes_of_the_start_alone():
    """It is said a few times, and a rank may have joined again meanwhile."""
    head = Head(["h1", "h2", "h3"], KEEP_ALIVE)
    head._lives[2] = "a later life"
    for dead in ([1, 2], [[1], 1], None, "1"):
        head.hear_of_deaths(0.0, dead)
    assert (head.dead, head.live) == ({1}, {0, 1, 2})

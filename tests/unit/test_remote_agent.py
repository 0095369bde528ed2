"""The talk of an agent with the head, in virtual time: datagrams lost, doubled, late or forged."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from ecrm.process.remote_agent import BEAT, PATIENCE, Lost, Talk, output, told, understood

KEEP_ALIVE = 2.0
SECRET = b"secret"


@dataclass
class Network:
    """Two sides and the datagrams between them; `carries(now, sender)` says which get through."""

    seed: int = 0
    loss: float = 0.0
    doubled: float = 0.0
    delay: tuple[float, float] = (0.0001, 0.0002)
    cut: dict[str, float] = field(default_factory=dict)
    """By sender, the time from which nothing of it comes through."""

    def __post_init__(self) -> None:
        self.now = 100.0
        self.draw = random.Random(self.seed)
        self.sides = {
            "agent": Talk(SECRET, "agent", 3, KEEP_ALIVE, 7, lambda: self.now),
            "head": Talk(SECRET, "head", 3, KEEP_ALIVE, clock=lambda: self.now),
        }
        self.came: dict[str, list[bytes]] = {"agent": [], "head": []}
        self.lost: dict[str, float] = {}
        self.under_way: list[tuple[float, int, str, bytes]] = []
        self.count = 0

    def run(self, seconds: float, take: bool = True) -> None:
        end = self.now + seconds
        while self.now < end:
            for name, side in self.sides.items():
                if name in self.lost:
                    continue
                for datagram in side.due():
                    self.carry(name, datagram)
                try:
                    if side.met:
                        side.check()
                except Lost:
                    self.lost[name] = self.now
            self.now = min([end, self.now + 0.01, *(each[0] for each in self.under_way[:1])])
            while self.under_way and self.under_way[0][0] <= self.now:
                _, _, to, datagram = heapq.heappop(self.under_way)
                self.came[to] += self.sides[to].hear(datagram, take) or []

    def carry(self, sender: str, datagram: bytes) -> None:
        if self.now >= self.cut.get(sender, float("inf")):
            return
        for _ in range(1 + (self.draw.random() < self.doubled)):
            if self.draw.random() >= self.loss:
                self.count += 1
                to = "head" if sender == "agent" else "agent"
                when = self.now + self.draw.uniform(*self.delay)
                heapq.heappush(self.under_way, (when, self.count, to, datagram))


@pytest.mark.parametrize("seed", range(5))
def test_every_message_comes_once_and_in_order(seed):
    network = Network(seed, loss=0.2, doubled=0.1, delay=(0.001, 0.08))
    there, back = ([b"%d" % number for number in range(count)] for count in (300, 50))
    for message in there:
        network.sides["agent"].send(message)
    network.run(0.5)
    for message in back:
        network.sides["head"].send(message)
    network.run(60)
    assert network.came == {"head": there, "agent": back}
    assert network.lost == {} and all(side.all_heard for side in network.sides.values())


def test_a_message_that_is_not_taken_is_said_again():
    network = Network()
    network.run(0.2)
    network.sides["agent"].send(b"output")
    network.run(5, take=False)
    assert network.came["head"] == [] and network.lost == {}
    network.run(1)
    assert network.came["head"] == [b"output"]


def test_a_quiet_talk_says_no_more_than_its_signs_of_life():
    network = Network()
    network.run(0.1)
    before = network.count
    network.run(10)
    assert network.count - before <= 2 * 10 / (BEAT * KEEP_ALIVE) + 2


def test_the_agent_gives_up_before_the_head_does():
    """A host that is cut off has killed its ranks when the others go on without them."""
    assert PATIENCE["agent"] + BEAT < PATIENCE["head"] < 1


@pytest.mark.parametrize("cut", [("agent", "head"), ("agent",), ("head",)], ids=str)
def test_whichever_way_is_cut_the_agent_gives_up_first(cut):
    network = Network(cut=dict.fromkeys(cut, 103.0))
    network.run(10)
    first, last = network.lost["agent"], network.lost["head"]
    assert (
        103.0
        < first
        < last
        <= 103.0
        + (1 + 2 * BEAT) * KEEP_ALIVE
        + PATIENCE["agent"] * (KEEP_ALIVE if cut == ("head",) else 0)
    )


def test_a_cut_within_the_patience_costs_nothing():
    network = Network(loss=0.5)
    network.run(20)
    assert network.lost == {}


def test_the_head_talks_to_the_first_agent_alone():
    """A starter that was started again may have started two."""
    now = 0.0
    head = Talk(SECRET, "head", 3, KEEP_ALIVE, clock=lambda: now)
    first, second = (Talk(SECRET, "agent", 3, KEEP_ALIVE, life, lambda: now) for life in (7, 8))
    assert head.due() == []
    for agent in (first, second):
        agent.send(b"of %d" % agent._life)
        (datagram,) = agent.due()
        assert head.hear(datagram) == ([b"of 7"] if agent is first else [])
    (answer,) = head.due()
    assert (first.hear(answer), second.hear(answer)) == ([], [])
    assert (first.met, second.met) == (True, False)


def test_strangers_replays_and_reflections_have_no_effect():
    now = 0.0
    head = Talk(SECRET, "head", 3, KEEP_ALIVE, clock=lambda: now)
    agent = Talk(SECRET, "agent", 3, KEEP_ALIVE, 7, lambda: now)
    (datagram,) = agent.due()
    for wrong in (
        b"",
        datagram[:40],
        datagram[:-1] + b"x",
        *Talk(b"other", "agent", 3, KEEP_ALIVE, 7, lambda: now).due(),
        *Talk(SECRET, "agent", 4, KEEP_ALIVE, 7, lambda: now).due(),
    ):
        assert head.hear(wrong) is None and not head.met
    assert agent.hear(datagram) is None, "its own"
    assert head.hear(datagram) == [] and head.met
    now = PATIENCE["head"] * KEEP_ALIVE + 0.01
    assert head.hear(datagram) == []
    with pytest.raises(Lost, match="nothing was heard for 1.8 s"):
        head.check()


def test_messages_are_understood_or_refused():
    assert understood(output(2, 70_000, b"a\nb")) == (2, 70_000, b"a\nb")
    assert understood(told(rank=1, exit=0)) == {"rank": 1, "exit": 0}
    for nonsense in (b"", b"nonsense", b"5", b"[1]", b"\xff", b"\1", b"\3aaaaa"):
        with pytest.raises(Lost, match="what came is no message"):
            understood(nonsense)

"""Ranks that have joined, and the ranks of their host: processes, memory, whereabouts, cores."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ecrm.process.cores import Cores
from ecrm.run.connect import Acquaintances, Cluster
from ecrm.run.hello import Hello
from ecrm.run.slot_faults import Place
from ecrm.run.whereabouts import Whereabouts, word_of
from ecrm.testing.simulate.oracle import Alone
from ecrm.transport.shared_memory import SharedMemory

RANKS = 2


@dataclass
class OneRank:
    """A rank with shared memory, on `host`; its first `process` was another."""

    number: int
    host: str = "node1"
    cluster: Cluster = field(init=False)

    def __post_init__(self):
        self.transport = Alone()
        self.transport.rank = self.number
        self.transport.shared_memory = memory = SharedMemory(RANKS)
        self.transport.allocate_shared = memory.allocate
        word, offset = word_of(self.transport)
        self.whereabouts = Whereabouts.of_ranks(self.transport, word, {})
        before = {rank: {"pid": 1, "host": "gone", "cores": [0]} for rank in range(RANKS)}
        cores = Cores(self.transport, [self.number])
        self.cluster = Cluster(None, before, (), None, cores, False)
        process = {"pid": os.getpid(), "host": self.host, "cores": [0, 1]}
        hello = Hello(process, "", False, False, 0, memory.offer(self.host), offset)
        self.known = Acquaintances(self.transport, hello, self.cluster, self.whereabouts)


def introduce(*ranks):
    facts = {each.number: each.known.about() for each in ranks}
    answers = {each.number: each.known.meet(facts) for each in ranks}
    for each in ranks:
        each.known.met(answers)


def test_ranks_of_a_host_read_each_others_memory():
    first, second = OneRank(0), OneRank(1)
    introduce(first, second)
    assert first.transport.shared_memory.readers == {1}
    tensor = second.transport.shared_memory.allocate(8)
    tensor += 7
    read = first.transport.shared_memory.memory_of(1)
    offset = second.transport.shared_memory.offset(tensor)
    assert read[offset:][:32].view("f4").tolist() == [7.0] * 8
    introduce(first, second)  # once more, as after a death meanwhile
    assert first.transport.shared_memory.memory_of(1) is read, "mapped once"


def test_ranks_of_other_hosts_do_not():
    first, second = OneRank(0), OneRank(1, host="node2")
    introduce(first, second)
    assert first.transport.shared_memory.readers == frozenset()
    assert first.transport.shared_memory.memory_of(1) is None


def test_the_processes_are_those_that_live():
    first, second = OneRank(0), OneRank(1)
    introduce(first, second)
    for each in (first, second):
        assert [process["pid"] for process in each.cluster.processes.values()] == 2 * [os.getpid()]
        assert each.cluster.cores._neighbours == [0, 1]


def test_the_place_of_a_rank_that_has_joined_is_known_at_its_death():
    first, second = OneRank(0), OneRank(1)
    assert first.whereabouts.place_of_dead(1) is None
    introduce(first, second)
    second.whereabouts.enter(Place(3, 1))
    assert first.whereabouts.place_of_dead(1) == (Place(3, 1),)

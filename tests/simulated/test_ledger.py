"""The ledgers of survivors: bytes for a thousand ranks, and a rank that has missed a recovery."""

from __future__ import annotations

from dataclasses import replace

import torch

from ecrm.engine.ledger import Ledger, Noticed
from ecrm.placement.assignment import initial_view
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.testing.simulated_transport import SimulatedCluster
from ecrm.transport.base import Transport
from ecrm.transport.message import Part, Received
from support.cpu_time import least_cpu_seconds


def ledger(view: View, rank: int, commits: int = 5) -> Ledger:
    return Ledger(commits, view, 1, False, False, (rank,), Noticed(5, "update", 1))


class Echo:
    """The transport of rank 0, on which every other rank says what rank 0 says."""

    rank = 0

    def __init__(self, ranks: int) -> None:
        self.ranks, self.received = ranks, 0

    def share(self, parts: list[Part]) -> dict[int, list[Received]]:
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        self.received += self.ranks * sum(each.nbytes for each in tensors)
        return {rank: list(parts) for rank in range(self.ranks)}

    def barrier(self, doing: str) -> None:
        pass


def test_a_thousand_survivors_send_a_rank_less_than_a_megabyte():
    view = initial_view("colocated", StripeShape(1000, 10, 2), 1000, 0, 1000, 3)
    transport = Echo(1000)
    agreed = ledger(view, 0).agreed(transport)
    assert agreed.view is view and agreed.dense == tuple(range(1000)) and agreed.replays == -1
    assert transport.received < 1e6
    seconds = least_cpu_seconds(lambda: ledger(view, 0).agreed(Echo(1000)))
    assert seconds < 0.45, "half of what a view from each rank took"


def test_a_rank_that_has_missed_a_recovery_gets_the_view_of_the_others():
    old = initial_view("dedicated", StripeShape(3, 2, 1), 1, 1, 2, 2)
    new = replace(old, epoch=3, live=(0, 1, 2, 4))

    def program(transport: Transport) -> Ledger:
        view = old if transport.rank == 1 else new
        return ledger(view, transport.rank, commits=transport.rank).agreed(transport)

    agreed = SimulatedCluster(4, seed=1).run(program).results
    assert [each.view for each in agreed.values()] == [new] * 4
    assert {each.commits for each in agreed.values()} == {3}
    assert {each.replays for each in agreed.values()} == {-1}


def test_a_commit_and_a_view_known_to_a_newcomer_alone_do_not_count():
    """A newcomer has no rows of that commit, and the rank that told of the commit has died."""
    view = initial_view("dedicated", StripeShape(3, 2, 1), 1, 1, 2, 2)
    later = replace(view, epoch=7, live=(0, 1, 2, 3))

    def program(transport: Transport) -> Ledger:
        if transport.rank != 2:
            return ledger(view, transport.rank, commits=5).agreed(transport)
        mine = replace(ledger(later, 2, commits=6), newcomers=(2,))
        return mine.agreed(transport)

    agreed = SimulatedCluster(4, seed=1).run(program).results
    assert {(each.commits, each.newest) for each in agreed.values()} == {(5, (0, 1, 3))}
    assert [each.view for each in agreed.values()] == [view] * 4


def test_all_ranks_with_the_newest_commit_are_named_also_after_many_commits():
    view = initial_view("dedicated", StripeShape(3, 2, 1), 1, 1, 2, 2)

    def program(transport: Transport) -> Ledger:
        commits = 999 if transport.rank == 1 else 1000
        return ledger(view, transport.rank, commits).agreed(transport)

    agreed = SimulatedCluster(4, seed=1).run(program).results
    assert {each.newest for each in agreed.values()} == {(0, 2, 3)}

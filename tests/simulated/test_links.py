"""Whole schedules of training over simulated links: real links, real membership, virtual time."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from ecrm.kernels import links
from ecrm.kernels.links import reference
from ecrm.testing.simulate.schedule import draw
from ecrm.testing.simulate.seed_range import run_range
from ecrm.testing.simulate.simulation import Failed, run_schedule
from ecrm.testing.simulated_transport import (
    LinkCluster,
    LinkFaults,
    RandomFaults,
    SimulationError,
)
from ecrm.testing.simulated_transport.link_cluster import GATHERED
from ecrm.testing.simulated_transport.network import HEAD
from ecrm.transport.base import PeerFailure
from ecrm.transport.by_host import LEAST_RANKS
from support.link_defects import LINK_DEFECTS
from support.seeds import some_and_more


@pytest.mark.parametrize("seeds", some_and_more(4, 100))
def test_schedules_over_links_finish_with_the_oracles_bits(seeds):
    totals = run_range(seeds, "links", jobs=1)
    print(totals)
    assert totals.refused == 0
    each = len(seeds)
    assert totals.deaths > 2 * each and totals.recoveries > each
    assert totals.mix["resets of connections"] > 10 * each
    assert totals.mix["short cuts of links"] > each / 2
    assert totals.mix[GATHERED] > each
    if each > 50:
        assert totals.mix["cuts for good"] > each / 5
        assert totals.mix["ranks given up"] > each / 5
        assert totals.mix["dead ranks that come back"] > each / 5


DEFECT_SEEDS = 40
"""Schedules within which a defect is found."""
QUICK = (
    "the head is less patient than the lease",
    "gathered messages go to the wrong ranks",
    "an agreement leaves a rank out",
)
"""Defects that are found at once; the others are looked for in `make drill`."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.drill])
        for name in LINK_DEFECTS
    ],
)
def test_a_defect_of_links_is_found(name, monkeypatch):
    LINK_DEFECTS[name](monkeypatch)
    with pytest.raises(Failed):
        for seed in range(DEFECT_SEEDS):
            run_schedule(draw(seed, "links"))


VIOLENT = LinkFaults(reset=0.5, reset_within=300, loss=0.1, doubled=0.5, pause=0.05, window=500)


def rounds(transport):
    """Twenty rounds in which each rank tells all ranks its number; returns the finished rounds."""
    done = 0
    while done < 20:
        try:
            mine = torch.full((100,), transport.rank)
            came = transport.exchange({rank: [mine] for rank in transport.live})
            assert all((tensor == sender).all() for sender, (tensor,) in came.items())
            assert list(came) == list(transport.live)
            if transport.agree(True):
                done += 1
        except PeerFailure:
            transport.shrink()
            done = min(int(tensor) for (tensor,) in _told(transport, done).values())
    return done


def _told(transport, done):
    while True:
        try:
            told = transport.share([torch.tensor([done])])
            transport.barrier("telling")
            return told
        except PeerFailure:
            transport.shrink()


def cluster(seed, network=VIOLENT, deaths=1, **more):
    faults = RandomFaults(most=deaths, per_call=0.02, together=0.0)
    hosts = more.pop("hosts", range(4))
    return LinkCluster(len(hosts), seed, faults, network=network, hosts=hosts, **more)


def test_a_seed_is_a_run_whichever_machine_the_links_are():
    traces = [(cluster(3, kind=kind).run(rounds).trace) for kind in (links, links, reference)]
    assert traces[0] == traces[1] == traces[2] and len(traces[0]) > 100


@pytest.mark.parametrize("seed", range(4))
def test_messages_gathered_by_host_arrive_over_links_that_break(seed):
    network = replace(VIOLENT, least_ranks=2, lent_bytes=(1, 1 << 16)[seed % 2])
    gathers = cluster(seed, network, hosts=(0, 0, 1, 1, 2, 2, 2))
    results = gathers.run(rounds).results
    assert len(results) >= 6 and gathers.mix["resets of connections"]
    assert gathers.mix[GATHERED] == gathers.head.epoch


def test_a_rank_that_computes_for_long_costs_nobody():
    network = replace(VIOLENT, computes=1.0)
    busy = cluster(1, network, deaths=0)

    def program(transport):
        busy.enter_phase(transport.rank, 0, "forward")
        busy.processes[transport.rank].wait(5.0, lambda: False, deaf=transport.rank == 2)
        return rounds(transport)

    assert set(busy.run(program).results) == set(range(4)) and busy.time.now > 5


@pytest.mark.parametrize("ends", [(0, 1), (HEAD, 1)])
@pytest.mark.parametrize("ways", [1, 2])
def test_a_cut_for_good_costs_the_host_that_the_rules_name(ends, ways):
    """And a cut that no rule allows for breaks the run off: the twin."""

    def parted(allowed):
        run = cluster(5, replace(VIOLENT, pause=1e9, reset=0.0), deaths=0)
        run.given_up.update(allowed)

        def program(transport):
            transport.agree(True)
            if transport.rank == 0:
                run.processes[0].wait(0.2, lambda: False)  # the others have agreed, too
                for way in (ends, ends[::-1])[:ways]:
                    run.network.cut(*way, 1e9)
            return rounds(transport)

        return run.run(program)

    assert set(parted({1}).results) == {0, 2, 3}
    with pytest.raises(SimulationError, match="no rule says so"):
        parted(())


def test_networks_are_drawn_from_calm_to_violent():
    drawn = [LinkFaults.drawn(Random(seed)) for seed in range(60)]
    assert {each.reset for each in drawn} == {0.0, 0.1, 0.5}
    assert {each.partings for each in drawn} == {0, 1, 2}
    assert {each.least_ranks for each in drawn} == {1, 2, LEAST_RANKS}

"""Chain replication: what a link holds, what a step sends, and what schedules survive."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ecrm.placement.stripes import StripeShape
from ecrm.protection.chain import ChainProtection
from ecrm.testing.simulate.schedule import draw
from ecrm.testing.simulate.simulation import run_schedule
from support.seeds import some_and_more


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_links_go_down_from_the_head_and_are_copies(copies):
    chain = ChainProtection(6, copies)
    assert chain.shape == StripeShape(6, 1, copies - 1)
    for head in range(6):
        links = [chain._holder(head, link) for link in reversed(range(copies - 1))]
        assert links == [(head - distance) % 6 for distance in range(1, copies)]
    assert torch.equal(chain._coefficients, torch.ones_like(chain._coefficients))


def test_other_numbers_of_copies_are_refused():
    for copies in (1, 5):
        with pytest.raises(ValueError, match=f"2 to 4 copies, not {copies}"):
            ChainProtection(6, copies)


def test_a_commit_costs_one_exchange_per_link_and_one_record_per_copy():
    """Against erasure with the same stripes: the same rows sent, but one after the other."""
    schedule = next(
        s
        for s in (draw(seed, "survivable") for seed in range(10_000))
        if s.workload.protection == "chain" and s.workload.m == 3
    )
    quiet = replace(schedule, deaths=0, workload=replace(schedule.workload, scrub_rows_per_step=0))
    calls = {
        name: run_schedule(replace(quiet, workload=replace(quiet.workload, protection=name))).calls
        for name in ("chain", "erasure")
    }
    ranks, commits = (
        quiet.workload.world_size,
        -(-quiet.workload.steps // quiet.workload.commit_interval),
    )
    assert calls["chain"] - calls["erasure"] == 2 * ranks * commits


@pytest.mark.parametrize("seeds", some_and_more(7, 20))
def test_schedules_of_chains_survive_what_they_promise(seeds):
    """The survivable suite draws chains too; most of these lose ranks."""
    chains = [
        s
        for s in (draw(seed, "survivable") for seed in range(1000))
        if s.workload.protection == "chain"
    ]
    of = {m: [s for s in chains if s.workload.m == m] for m in (1, 2, 3)}
    schedules = [of[number % 3 + 1][number // 3] for number in seeds]
    assert sum(run_schedule(schedule).deaths for schedule in schedules) > len(seeds)

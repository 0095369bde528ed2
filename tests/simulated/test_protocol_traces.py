"""Traces of simulated runs of the real engine are runs of the model of the protocol."""

from __future__ import annotations

from collections import Counter

import pytest

from ecrm.engine.engine import Engine
from support.protocol_traces import first_not_allowed, traced
from support.seeds import some_and_more


@pytest.mark.parametrize(
    "lost_touch, seeds",
    [
        pytest.param(share, *each.values, id=f"{each.id} {share}", marks=each.marks)
        for share, some, total in [(0.0, 20, 600), (0.01, 8, 200)]
        for each in some_and_more(some, total)
    ],
)
def test_the_model_allows_every_act_of_a_simulated_run(lost_touch, seeds):
    found: Counter[str] = Counter()
    for seed in seeds:
        acts = traced(seed, lost_touch=lost_touch)
        found.update(act for _, act, _ in acts)
        place = first_not_allowed(acts)
        assert place is None, (seed, acts[: place + 1])
    assert found["dies"] > len(seeds) and found["recovers"] > len(seeds), found
    assert not lost_touch or found["loses touch"] > len(seeds) / 2, found


@pytest.mark.parametrize("act", ["dies", "fails", "agrees", "commits"])
def test_a_trace_without_one_of_its_acts_is_not_allowed(act):
    acts = traced(0)
    places = [place for place, (_, word, _) in enumerate(acts) if word == act]
    assert places
    assert first_not_allowed(acts) is None
    assert first_not_allowed([*acts[: places[0]], *acts[places[0] + 1 :]]) is not None


def test_an_engine_that_commits_before_its_agreement_is_not_allowed(monkeypatch):
    right = Engine._agree_on_commit

    def early(self, compares=False):
        self.state.hooks.committed()
        right(self, compares)

    monkeypatch.setattr(Engine, "_agree_on_commit", early)
    # the hook tells of the commit before: the numbers show the difference
    monkeypatch.setattr(Engine, "committed", property(lambda self: self.state.step))
    assert any(first_not_allowed(traced(seed)) is not None for seed in range(5))

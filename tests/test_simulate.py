"""Fault schedules on the real engine over the simulated cluster, and canaries that they must catch."""

from __future__ import annotations

import numpy as np
import pytest

import ecrm.engine.engine as engine_module
from ecrm.placement.view import mark_whole, plan_recovery
from ecrm.simulate.cli import run_range
from ecrm.simulate.run import Failed, run_schedule
from ecrm.simulate.schedule import draw, parse_seed

CANARY_SEEDS = 100


def test_survivable_schedules_finish_with_the_oracles_bits():
    line = run_range(range(1000), "survivable", jobs=2)
    print(line)
    assert " 0 refusals" in line
    assert int(line.split(" recoveries")[0].split()[-1].replace(",", "")) > 1000


def test_one_fault_too_many_is_refused_or_survived_but_never_wrong():
    line = run_range(range(300), "fatal", jobs=2)
    print(line)
    assert int(line.split(" refusals")[0].split()[-1].replace(",", "")) > 100


def test_a_seed_is_a_schedule():
    assert draw(17, "survivable") == draw(17, "survivable")
    assert draw(17, "survivable") != draw(18, "survivable")
    first, second = run_schedule(draw(17, "survivable")), run_schedule(draw(17, "survivable"))
    assert first == second
    assert parse_seed("17") == 17
    assert parse_seed("7c2d1f0") == parse_seed("7c2d1f0") != parse_seed("7c2d1f1")


def _caught_at(breaks=None) -> int | None:
    """Seeds needed until a schedule fails; None when none of them does, as for an engine that is not broken (above)."""
    for seed in range(CANARY_SEEDS):
        try:
            run_schedule(draw(seed, "survivable"), breaks)
        except Failed:
            return seed + 1
    return None


def _no_undo(engine):
    for target in (engine.protection,):
        target.undo = lambda: None


def _wrong_decode(engine):
    right = engine.protection.code.decode_matrix

    def wrong(present, wanted):
        matrix = np.array(right(present, wanted))
        matrix[0, 0] ^= 1
        return matrix

    engine.protection.code.decode_matrix = wrong


def _wrong_source(engine):
    class Shifted(type(engine.layouts[0])):
        def local_of_unit(self, stripes, unit):
            return (super().local_of_unit(stripes, unit) + self.shape.k) % max(self.data_rows_per_shard, 1)

    engine._context.layouts = tuple(Shifted(layout.shape, layout.rows) for layout in engine.layouts)


@pytest.mark.parametrize("breaks", [_no_undo, _wrong_decode, _wrong_source])
def test_a_broken_engine_is_caught(breaks):
    seeds = _caught_at(breaks)
    print(f"{breaks.__name__} caught within {seeds} seeds")
    assert seeds is not None


def test_a_broken_remap_is_caught(monkeypatch):
    """A recovery that hands out lost shards as if they were whole."""

    def careless(view, dead, shape, replicas):
        after = plan_recovery(view, dead, shape, replicas)
        return mark_whole(after, set(after.rebuilding) - set(view.rebuilding))

    monkeypatch.setattr(engine_module, "plan_recovery", careless)
    assert _caught_at() is not None

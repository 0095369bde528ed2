"""Servers lost one after the other, each recovered on those that are left."""

from __future__ import annotations

import pytest

from support.drilling import BASE, REBUILT_AT_ONCE, drill


def shapes_of(run) -> list[tuple[int, int, int, int]]:
    return [(e["servers"], e["k"], e["m"], e["failures_left"]) for e in run.events_of("reshaped")]


@pytest.mark.drill
def test_two_servers_are_lost_one_after_the_other_where_parity_covers_one(
    tmp_path, criteo_rows, undisturbed
):
    sets = {
        **BASE,
        **REBUILT_AT_ONCE,
        "cluster.layout": "colocated",
        "cluster.servers": 4,
        "cluster.spares": 0,
    }
    run = drill(tmp_path / "run", criteo_rows, sets, ("1@5:parity", "2@20:update"))
    assert run.model == undisturbed
    assert shapes_of(run) == [(3, 2, 1, 1)]
    assert "laid out anew over 3 servers (k=2 m=1)" in run.output
    most = run.summary["memory_bytes"]["data"]  # every row travels once at most
    assert all(
        0 < event["moved_bytes"] <= most and event["seconds"] > 0
        for event in run.events_of("reshaped")
    )

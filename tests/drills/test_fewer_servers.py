"""Servers lost two at a time until few are left, and all ranks of a host lost together."""

from __future__ import annotations

import pytest

from support.drilling import BASE, REBUILT_AT_ONCE, drill, launch


def shapes_of(run) -> list[tuple[int, int, int, int]]:
    return [(e["servers"], e["k"], e["m"], e["failures_left"]) for e in run.events_of("reshaped")]


@pytest.mark.parametrize("interval", [1, 8])
@pytest.mark.parametrize(
    ("last", "shapes"),
    [
        (("2@32:update", "6@32:update"), [(6, 4, 2, 2), (4, 2, 2, 2)]),
        (("2@14:reshape", "6@32:parity"), [(6, 4, 2, 2)]),
    ],
    ids=["after the second reshape", "inside it, which leaves too few servers for another"],
)
def test_six_of_eight_servers_are_lost_two_at_a_time(
    tmp_path, criteo_rows, undisturbed, interval, last, shapes
):
    sets = {
        **BASE,
        **REBUILT_AT_ONCE,
        "train.steps": 40,
        "cluster.layout": "colocated",
        "cluster.servers": 8,
        "cluster.spares": 0,
        "protection.k": 6,
        "protection.m": 2,
        "protection.commit_interval": interval,
    }
    run = drill(tmp_path / "run", criteo_rows, sets, ("0@5", "1@5", "3@20", "4@20", *last))
    assert run.model == undisturbed
    assert shapes_of(run) == shapes


def test_without_reshape_protection_stays_less(tmp_path, criteo_rows, undisturbed):
    sets = {
        **BASE,
        **REBUILT_AT_ONCE,
        "cluster.layout": "colocated",
        "cluster.servers": 4,
        "cluster.spares": 0,
    }
    run = drill(
        tmp_path / "run", criteo_rows, {**sets, "protection.reshape": False}, ("1@5:parity",)
    )
    assert run.model == undisturbed
    assert shapes_of(run) == []
    assert run.summary["failures_left"] == 0
    assert "too few ranks are left to keep stripe members apart" in run.output


@pytest.mark.parametrize("layout", ["dedicated", "colocated"])
def test_all_ranks_of_a_host_are_lost_together(tmp_path, criteo_rows, undisturbed, layout):
    """Eleven ranks on four hosts, one of which has three ranks.

    A host never holds two of a stripe's units, so its loss counts as one.
    """
    sets = {
        **BASE,
        **REBUILT_AT_ONCE,
        "cluster.layout": layout,
        "cluster.servers": 6,
        "cluster.spares": 3 if layout == "dedicated" else 5,
        "cluster.failure_domain": "host",
        "testing.imitated_hosts": 4,
    }
    kills = ("1@9:parity", "5@9:parity", "9@9:parity")
    run = drill(tmp_path / "run", criteo_rows, sets, kills)
    assert run.model == undisturbed
    assert run.summary["failures_left"] == 1


def test_hosts_too_few_for_the_stripes_are_refused(tmp_path, criteo_rows):
    sets = {
        **BASE,
        "cluster.servers": 6,
        "cluster.spares": 0,
        "cluster.failure_domain": "host",
        "testing.imitated_hosts": 2,
    }
    run = launch(tmp_path / "run", criteo_rows, sets)
    assert run.code == 2, run.output
    assert run.output.count("ecrm: error:") == 1
    assert (
        "need at least 3 failure domains, there are 2: set protection.k=1 or "
        "cluster.failure_domain=rank, or start on more hosts" in run.output
    )
    assert "Traceback" not in run.output

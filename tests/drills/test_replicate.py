"""Replication under real kills: the undisturbed model, and what two copies do not cover."""

from __future__ import annotations

import pytest

from support.drilling import BASE, REBUILT_AT_ONCE, drill, launch

REPLICATE = {**BASE, "protection.name": "replicate", "cluster.servers": 4}


def test_a_server_and_a_trainer_at_once_are_more_than_two_copies_cover(tmp_path, criteo_rows):
    run = launch(tmp_path / "run", criteo_rows, REPLICATE, ("1@6:parity", "4@6:parity"))
    assert run.code == 3, run.output
    assert (
        "more was lost than ultralight replication, 2 copies can bring back: 2 failure domains"
        in run.output
    )


@pytest.mark.parametrize(
    ("copies", "kills"),
    [
        (2, ("1@6:parity", "4@12:forward")),
        (3, ("1@6:parity", "4@6:parity", "0@20:update")),
    ],
)
def test_the_model_is_the_undisturbed_one(tmp_path, criteo_rows, undisturbed, copies, kills):
    sets = {
        **REPLICATE,
        "protection.copies": copies,
        **REBUILT_AT_ONCE,
        "cluster.spares": 3,
    }
    run = drill(tmp_path / "run", criteo_rows, sets, kills)
    assert run.model == undisturbed
    assert run.summary["failures_left"] == copies - 1

"""Replication: what two copies do not cover."""

from __future__ import annotations

from support.drilling import BASE, launch

REPLICATE = {**BASE, "protection.name": "replicate", "cluster.servers": 4}


def test_a_server_and_a_trainer_at_once_are_more_than_two_copies_cover(tmp_path, criteo_rows):
    run = launch(tmp_path / "run", criteo_rows, REPLICATE, ("1@6:parity", "4@6:parity"))
    assert run.code == 3, run.output
    assert (
        "more was lost than ultralight replication, 2 copies can bring back: 2 failure domains"
        in run.output
    )

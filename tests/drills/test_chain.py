"""Chain replication: the undisturbed model after real kills."""

from __future__ import annotations

import pytest

from support.drilling import BASE, REBUILT_AT_ONCE, drill

CHAIN = {**BASE, "protection.name": "chain", "cluster.servers": 4}


@pytest.mark.parametrize(
    ("copies", "kills"),
    [
        (3, ("1@6:parity", "2@6:parity", "0@20:update")),
        (2, ("4@6:forward", "1@14:lookup")),
    ],
)
def test_the_model_is_the_undisturbed_one(tmp_path, criteo_rows, undisturbed, copies, kills):
    sets = {
        **CHAIN,
        "protection.copies": copies,
        **REBUILT_AT_ONCE,
        "cluster.spares": 3,
    }
    run = drill(tmp_path / "run", criteo_rows, sets, kills)
    assert run.model == undisturbed
    assert run.summary["failures_left"] == copies - 1

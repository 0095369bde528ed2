"""What `PROMISES` says of each protection holds under real mpirun with real kills."""

from __future__ import annotations

import pytest

from support.drilling import BASE, drill, launch
from support.promises import (
    ENDS,
    PROMISES,
)


@pytest.mark.parametrize(
    "name", [name for name, promise in PROMISES.items() if promise.survives or promise.durable]
)
def test_real_kills_that_it_covers_leave_the_undisturbed_model(
    name, tmp_path, criteo_rows, undisturbed
):
    promise = PROMISES[name]
    kills = tuple(f"{rank}@12:update" for rank in range(promise.survives or 1))
    # what is written to disk is then the protection's own
    sets = {**BASE, "cluster.spares": 2, "checkpoint.at_end": False, **promise.sets}
    run = drill(tmp_path / "run", criteo_rows, sets, kills)
    assert (run.model == undisturbed) == promise.exact
    assert bool(run.events_of("rolled_back")) == (promise.survives == 0)
    summary = run.summary
    assert (
        summary["protection"]["name"]
        == summary["config"]["protection"]["name"]
        == promise.workload["protection"]
    )
    assert promise.in_words in run.output
    assert summary["failures_left"] == promise.survives
    assert all(failure["redone_steps"] <= promise.redone for failure in summary["failures"])
    assert bool(summary["memory_bytes"]["parity"]) == bool(
        promise.redundancy or not promise.exactly
    )
    assert bool(summary["memory_bytes"]["undo"]) == promise.logs
    traffic = summary["traffic_bytes_per_rank"]
    assert [rank["rank"] for rank in traffic] == [
        rank["rank"] for rank in summary["memory_bytes_per_rank"]
    ]
    assert sum(rank["sent"].get("update", 0) for rank in traffic) > 0
    assert (sum(rank["written"] for rank in traffic) > 0) == (promise.durable is not None)


@pytest.mark.parametrize(
    "name", [name for name, promise in PROMISES.items() if promise.beyond == ENDS]
)
def test_real_kills_beyond_it_end_the_run_with_one_message(name, tmp_path, criteo_rows):
    promise = PROMISES[name]
    kills = tuple(f"{rank}@12:update" for rank in range(promise.survives + 1))
    run = launch(tmp_path / "run", criteo_rows, {**BASE, **promise.sets}, kills)
    assert run.code == 3, run.output
    said = [line for line in run.output.splitlines() if line.startswith("ecrm: error:")]
    assert len(said) == 1 and promise.in_words in said[0], run.output
    assert "Traceback" not in run.output
    assert (run.folder / "failure.json").exists() and not (run.folder / "summary.json").exists()

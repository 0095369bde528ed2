"""The memory that a run is said to need is what it holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ecrm.config import load_config
from ecrm.launch.memory_needs import LIBRARIES_BYTES, PROCESS_BYTES, Needs
from support.drilling import BASE
from support.grey_failures import finished, ranks_of, started


def near(estimated: float, measured: float, share: float = 0.15) -> bool:
    return abs(estimated - measured) <= share * measured


def test_what_is_estimated_is_what_a_run_holds(undisturbed_run, criteo_rows):
    """Rows, parity and replicas as a real run counted them, its processes as the system did."""
    summary = undisturbed_run.summary
    config = load_config(
        "tiny", [f"data.path={criteo_rows}", *(f"{key}={value}" for key, value in BASE.items())]
    )
    needs, measured = Needs(config, 40), summary["memory_bytes"]
    assert near(
        config.cluster.servers * (needs.server.rows + needs.server.parity),
        measured["data"] + measured["parity"],
    )
    assert near(config.cluster.trainers * needs.trainer.dense, measured["dense"])
    assert (
        0.5 * measured["undo"] <= config.cluster.servers * needs.server.undo <= 3 * measured["undo"]
    )
    for rank in summary["memory_bytes_per_rank"]:
        assert near(PROCESS_BYTES + LIBRARIES_BYTES, rank["resident"], 0.3), rank


@pytest.mark.drill
def test_an_unused_spare_costs_little_memory_of_its_own(tmp_path, criteo_rows):
    """Ranks are forked from one process, and share the pages that no rank has changed."""
    sets = ("cluster.spares=4", "model.dense_arch=torchrec", "train.steps=400")
    process = started(tmp_path / "run", criteo_rows, *sets)
    spares = [rank["pid"] for rank in ranks_of(tmp_path / "run") if rank["rank"] >= 5]
    own = [private_dirty_bytes(pid) for pid in spares]
    finished(process, tmp_path / "run")
    assert len(own) == 4 and near(PROCESS_BYTES, max(own), 0.3), own


def private_dirty_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"Private_Dirty:\s+(\d+) kB", pages)[1]) * 1024

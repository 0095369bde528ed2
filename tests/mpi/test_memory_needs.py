"""The memory that a run is said to need is what it holds."""

from __future__ import annotations

from ecrm.config import load_config
from ecrm.launch.memory_needs import LIBRARIES_BYTES, PROCESS_BYTES, Needs
from support.drilling import BASE


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

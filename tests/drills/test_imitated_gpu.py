"""Ranks with an imitated GPU under mpirun: kills, and the model of the CPU, bit for bit."""

import pytest

from support.drilling import BASE, drill

ON_GPU = {
    **BASE,
    "testing.imitated_gpu": True,
    "kernels.backend": "reference",
    "cluster.servers": 3,
    "cluster.spares": 2,
    "protection.rebuild_rows_per_step": 100_000,
}


@pytest.mark.parametrize("devices", [("train",)])
def test_what_is_on_an_imitated_gpu_survives_kills(tmp_path, criteo_rows, undisturbed, devices):
    """A server dies, then a trainer."""
    sets = {**ON_GPU, **{f"{device}.device": "cuda" for device in devices}}
    run = drill(tmp_path / "run", criteo_rows, sets, ("1@9:parity", "3@20:backward"))
    assert run.model == undisturbed
    ran = run.summary["kernels_ran"]
    assert ran["dot_interaction"] == "reference"
    assert (ran["sparse_update"] == "reference") == ("storage" in devices)

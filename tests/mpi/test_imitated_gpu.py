"""Ranks with an imitated GPU under mpirun: a kill, and the model of the CPU, bit for bit."""

from support.drilling import BASE, drill

ON_GPU = {
    **BASE,
    "storage.device": "cuda",
    "train.device": "cuda",
    "testing.imitated_gpu": True,
    "kernels.backend": "reference",  # interpreted kernels take half a minute
    "cluster.servers": 3,
    "cluster.spares": 2,
    "protection.rebuild_rows_per_step": 100_000,
}


def test_what_is_on_an_imitated_gpu_survives_kills(tmp_path, criteo_rows, undisturbed):
    """A server dies, then a trainer."""
    run = drill(tmp_path / "run", criteo_rows, ON_GPU, ("1@9:parity", "3@20:backward"))
    assert run.model == undisturbed
    ran = run.summary["kernels_ran"]
    assert {
        ran[name] for name in ("sparse_update", "parity_apply", "decode", "dot_interaction")
    } == {"reference"}

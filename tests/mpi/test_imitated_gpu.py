"""Ranks with an imitated GPU under mpirun: a kill, and the model of the CPU, bit for bit."""

import pytest

from support.drilling import drill
from support.gpu_faults import ON_GPU, run_with_fault


@pytest.mark.drill
def test_what_is_on_an_imitated_gpu_survives_kills(tmp_path, criteo_rows, undisturbed):
    """A server dies, then a trainer."""
    run = drill(tmp_path / "run", criteo_rows, ON_GPU, ("1@9:parity", "3@20:backward"))
    assert run.model == undisturbed
    ran = run.summary["kernels_ran"]
    assert {
        ran[name] for name in ("sparse_update", "parity_apply", "decode", "dot_interaction")
    } == {"reference"}
    # what is lent on a GPU is read where its twin lies
    shared = {each["rank"]: each["shared"] for each in run.summary["traffic_bytes_per_rank"]}
    assert min(shared[0], shared[2]) > 0


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("1@9:update", "hang"),
        pytest.param("1@9:update", "memory", marks=pytest.mark.drill),
        pytest.param("1@9:parity", "lost", marks=pytest.mark.drill),
        pytest.param("3@9:backward", "memory", marks=pytest.mark.drill),
        pytest.param("3@9:forward", "hang", marks=pytest.mark.drill),
    ],
)
def test_a_gpu_that_fails_costs_its_rank_and_no_bit(
    tmp_path, criteo_rows, undisturbed, fault, kind
):
    run = run_with_fault(tmp_path / "run", criteo_rows, fault, kind)
    assert run.model == undisturbed
    stall = run.summary["failures"][0]["stall_seconds"]
    assert (0.8 if kind == "hang" else 0.0) < stall < 6.0

"""Ranks under mpirun whose imitated GPU fails: the model of the CPU, bit for bit."""

import pytest

from support.gpu_faults import run_with_fault


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
    assert (1.6 if kind == "hang" else 0.0) < stall < 7.0

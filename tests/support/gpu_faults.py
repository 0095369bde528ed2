"""Runs in which the imitated GPU of a rank fails."""

from __future__ import annotations

from pathlib import Path

from support.drilling import BASE, Run, launch

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

SAID = {
    "memory": "its GPU has no memory left: CUDA out of memory. Tried to allocate",
    "lost": "its GPU is lost: CUDA error: an imitated GPU has fallen off the bus",
    "hang": "its GPU has not done for 2 s what it was given (cluster.gpu_hang_seconds): it hangs, "
    "or is busy for longer, which needs a larger cluster.gpu_hang_seconds",
}


def run_with_fault(
    folder: Path, data: Path, fault: str, kind: str, more: dict[str, object] | None = None
) -> Run:
    """A run in which the GPU of a rank fails. It ends well, and one line says what happened."""
    rank = fault.partition("@")[0]
    sets = {**ON_GPU, "cluster.gpu_hang_seconds": 2.0, "testing.gpu_fault": f"{fault}:{kind}"}
    run = launch(folder, data, {**sets, **(more or {})})
    assert run.code == 0, run.output
    said = [line for line in run.output.splitlines() if ": its GPU " in line]
    assert len(said) == 1 and said[0].startswith(f"! rank {rank}: {SAID[kind]}"), run.output
    assert said[0].endswith(": the rank is killed") and "Traceback" not in run.output
    assert [failure["ranks"] for failure in run.summary["failures"]] == [[int(rank)]]
    return run

"""TensorBoard scalars, as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ecrm.launch.scalars import FOLDER

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Every tag's steps and values, as TensorBoard itself reads the folder."""
    found = accumulator.EventAccumulator(str(run_dir / FOLDER), {accumulator.SCALARS: 0})
    found.Reload()
    tags = found.Tags()[accumulator.SCALARS]
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in tags}


def progress(step: int, loss: float | None) -> dict:
    fields = {"samples_per_second": 10.0, "rebuilt": 1.0, "failures_left": 1}
    return {"event": "progress", "step": step, "logged": {"loss": loss}, **fields}

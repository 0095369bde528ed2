"""The contents of summary.json and stopped.json."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecrm.base.wording import counted
from ecrm.device.copies import on_host
from ecrm.engine.engine import Engine
from ecrm.engine.memory_count import Memory
from ecrm.model.module_replica import ModuleReplica
from ecrm.protection.base import VerifyReport


@dataclass(frozen=True)
class Outcome:
    """The findings of all ranks together at the end of a run.

    `tables` are SHA-256, and `sums` the sums of hashes, of the tables by name. `training_seconds`
    is the time of all steps of this start of the run; `step_seconds` are quantiles of the time of
    one step.
    """

    tables: dict[str, str]
    sums: dict[str, str]
    verified: VerifyReport | None
    memory: Memory
    traffic: list[dict[str, Any]]
    training_seconds: float
    step_seconds: dict[str, float | None]


def flat_state(replica: ModuleReplica) -> list[Tensor]:
    """The dense state of a config's run, on the CPU: parameters, one step count, then each moment.

    Every part holds the numbers of all parameters. Digests of configs keep this arrangement of
    version 0.1, so that digests of all versions can be compared.
    """
    parameters = replica.parameters
    optimizer = replica.optimizer
    states = [] if optimizer is None else [optimizer.state.get(p, {}) for p in parameters]
    parts = [torch.cat([p.detach().reshape(-1) for p in parameters])]
    for name, first in states[0].items() if states else ():
        moments = [state[name].reshape(-1) for state in states]
        parts.append(first if name == "step" else torch.cat(moments))
    return on_host(*parts)


def summary_json(
    engine: Engine,
    outcome: Outcome,
    own: dict[str, Any],
    lives: list[dict[str, Any]],
    checkpoint: dict[str, Any],
    dense: Sequence[Tensor],
) -> dict[str, Any]:
    """The summary of a complete run; `checkpoint` is a result of `checkpoint_json`.

    `own` are fields specific to the kind of training. `dense` is the dense part to digest.
    """
    state, verified = engine.state, outcome.verified
    return {
        "steps": engine.step,
        "training_seconds": outcome.training_seconds,
        **own,
        **_digests(dense, outcome),
        "step_seconds": outcome.step_seconds,
        "memory_bytes": outcome.memory.total,
        "memory_bytes_per_rank": outcome.memory.per_rank,
        "traffic_bytes_per_rank": outcome.traffic,
        "protection": {
            "name": state.protection.name,
            "k": state.protection.shape.k,
            "m": state.protection.shape.m,
            "exact": state.protection.exact,
        },
        "parity": None
        if verified is None
        else {"stripes": verified.stripes, "mismatches": verified.mismatches},
        "scrub": None if state.scrub is None else asdict(state.scrub.report),
        "failures": [failure.to_dict() for failure in state.failures.failures],
        "interruptions": state.failures.interruptions,
        "restored": state.failures.restored,
        "failures_left": state.failures_left,
        "lives": lives,
        **checkpoint,
        "kernels_ran": {
            operation: kernel
            for rank in outcome.traffic
            for operation, kernel in sorted(rank["kernels"].items())
        },
    }


def _digests(tensors: Sequence[Tensor], found: Outcome) -> dict[str, Any]:
    """The digests of each table, of dense parameters with optimizer state, and of the model."""
    dense = hashlib.sha256()
    for tensor in tensors:
        dense.update(tensor.contiguous().numpy().data)
    model = hashlib.sha256("".join((*found.tables.values(), dense.hexdigest())).encode())
    sums = hashlib.sha256("".join((*found.sums.values(), dense.hexdigest())).encode())
    return {
        "tables": found.tables,
        "table_sums": found.sums,
        "dense_sha256": dense.hexdigest(),
        "model_sha256": model.hexdigest(),
        "model_digest": sums.hexdigest(),
    }


def stopped_json(
    engine: Engine, own: dict[str, Any], steps: int, number: signal.Signals, seconds: float
) -> dict[str, Any]:
    """The progress of a run after `seconds`, out of `steps` wanted, when signal `number` stops it.

    `own` are fields specific to the kind of training.
    """
    state = engine.state
    return {
        "steps": engine.step,
        "steps_wanted": steps,
        **own,
        "signal": number.name,
        "failures": [failure.to_dict() for failure in state.failures.failures],
        "interruptions": state.failures.interruptions,
        "failures_left": state.failures_left,
        "seconds": seconds,
    }


def checkpoint_json(step: int, why_not_kept: str) -> dict[str, Any]:
    """The fields on checkpoints: newest `step`, 0 for none, and why the last step has none."""
    return {"checkpoint_step": step or None, "checkpoint_failed": why_not_kept or None}


def stopped_in_words(stopped: dict[str, Any], folder: Path | None) -> str:
    """The content of stopped.json in one line, with the path of the file."""
    step = stopped["steps"]
    when = f"after step {step} of {stopped['steps_wanted']}" if step else "before the first step"
    samples = f"; {counted(stopped['samples'], 'sample')}" if "samples" in stopped else ""
    kept = stopped["checkpoint_step"]
    checkpoint = f", checkpoint of step {kept}" if kept else ""
    where = "" if folder is None else f"; in {folder / 'stopped.json'}"
    return (
        f"stopped by {stopped['signal']} {when}{samples}, "
        f"{counted(len(stopped['failures']), 'failure')} survived{checkpoint}{where}"
    )

"""What summary.json and stopped.json say of a run."""

from __future__ import annotations

import hashlib
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ecrm.engine.engine import Engine
from ecrm.engine.memory_count import Memory
from ecrm.protection.base import VerifyReport
from ecrm.train.build_engine import dense_of
from ecrm.train.evaluate import Evaluation
from ecrm.wording import counted


@dataclass(frozen=True)
class Outcome:
    """What the ranks have found out together at the end of a run.

    `tables` are the digests of the tables by name. `steps` is the number of steps in
    `training_seconds`, all of this start of the run; `step_seconds` are quantiles of the time of
    one. `ended_early` is what the event of that name says, None where all steps were trained.
    """

    tables: dict[str, str]
    evaluation: Evaluation
    verified: VerifyReport | None
    memory: Memory
    traffic: list[dict[str, Any]]
    steps: int
    training_seconds: float
    step_seconds: dict[str, float | None]
    ended_early: dict[str, Any] | None


def summary_json(
    engine: Engine,
    outcome: Outcome,
    global_batch: int,
    lives: list[dict[str, Any]],
    checkpoint: dict[str, Any],
) -> dict[str, Any]:
    """The summary of a complete run; `checkpoint` as `checkpoint_json` has it."""
    state, evaluation, verified = engine.state, outcome.evaluation, outcome.verified
    return {
        "steps": engine.step,
        "samples": engine.step * global_batch,
        "training_seconds": outcome.training_seconds,
        "samples_per_second": outcome.steps * global_batch / outcome.training_seconds,
        "train_logloss": float(dense_of(engine).loss_sum) / engine.step,
        "eval_logloss": evaluation.log_loss,
        "eval_auc": evaluation.auc,
        "eval_auc_error": evaluation.auc_error,
        "eval_samples": evaluation.samples,
        **_digests(engine, outcome.tables),
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
        "ended_early": outcome.ended_early,
        "failures_left": state.failures_left,
        "lives": lives,
        **checkpoint,
        "kernels_ran": {
            operation: kernel
            for rank in outcome.traffic
            for operation, kernel in sorted(rank["kernels"].items())
        },
    }


def _digests(engine: Engine, tables: dict[str, str]) -> dict[str, Any]:
    """SHA-256 of each table, of the dense parameters with their optimizer state, and of all."""
    dense = hashlib.sha256()
    for tensor in dense_of(engine).state_tensors:
        dense.update(tensor.contiguous().numpy().data)
    model = hashlib.sha256("".join((*tables.values(), dense.hexdigest())).encode())
    return {
        "tables": tables,
        "dense_sha256": dense.hexdigest(),
        "model_sha256": model.hexdigest(),
    }


def stopped_json(
    engine: Engine, global_batch: int, steps: int, number: signal.Signals, seconds: float
) -> dict[str, Any]:
    """How far a run has come in `seconds`, of the `steps` wanted, when signal `number` stops it."""
    state = engine.state
    return {
        "steps": engine.step,
        "steps_wanted": steps,
        "samples": engine.step * global_batch,
        "train_logloss": float(dense_of(engine).loss_sum) / engine.step if engine.step else None,
        "signal": number.name,
        "failures": [failure.to_dict() for failure in state.failures.failures],
        "interruptions": state.failures.interruptions,
        "failures_left": state.failures_left,
        "seconds": seconds,
    }


def checkpoint_json(step: int, unkept: str) -> dict[str, Any]:
    """The step of the newest checkpoint, 0 for none, and why there is none of the last step."""
    return {"checkpoint_step": step or None, "checkpoint_failed": unkept or None}


def stopped_in_words(stopped: dict[str, Any], folder: Path | None) -> str:
    """What stopped.json says, in one line, and where it is."""
    step, loss = stopped["steps"], stopped["train_logloss"]
    when = f"after step {step} of {stopped['steps_wanted']}" if step else "before the first step"
    losses = "" if loss is None else f", log loss {loss:.4f}"
    kept = stopped["checkpoint_step"]
    checkpoint = f", checkpoint of step {kept}" if kept else ""
    where = "" if folder is None else f"; in {folder / 'stopped.json'}"
    return (
        f"stopped by {stopped['signal']} {when}; {counted(stopped['samples'], 'sample')}{losses}, "
        f"{counted(len(stopped['failures']), 'failure')} survived{checkpoint}{where}"
    )

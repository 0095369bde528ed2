"""The words of the built-in trainer's run at its start and at its end."""

from __future__ import annotations

from typing import Any

from ecrm.base.wording import counted
from ecrm.config.schema import Config
from ecrm.model.dlrm import resolve_dense_arch
from ecrm.protection.base import Protection
from ecrm.run.announce import start_in_words as any_start_in_words


def own_fields(config: Config) -> dict[str, Any]:
    """The fields of the built-in model in `start_fields`."""
    return {"dense_arch": resolve_dense_arch(config.model.dense_arch)}


def start_in_words(
    config: Config, protection: Protection, fields: dict[str, Any], steps: int
) -> str:
    """The start of a run, in one line; `fields` are from `start_fields`."""
    trained = f"{counted(steps, 'step')} of {counted(config.train.global_batch, 'sample')}"
    arch = f"dense arch {fields['dense_arch']}, "
    return any_start_in_words(config, protection, fields, trained, arch)


def pace(summary: dict[str, Any] | None) -> str:
    """The speed of a run, and the quality of its model, in words; "" without a summary."""
    if summary is None:
        return ""
    auc = "-" if summary["eval_auc"] is None else f"{summary['eval_auc']:.4f}"
    return f"{summary['samples_per_second']:,.0f} samples/s, evaluation auc {auc}"

"""What a run of the built-in trainer says at its start and at its end."""

from __future__ import annotations

from typing import Any

from ecrm.base.wording import counted
from ecrm.config.schema import Config
from ecrm.model.dlrm import resolve_dense_arch
from ecrm.protection.base import Protection
from ecrm.rank.announce import start_in_words as any_start_in_words


def own_fields(config: Config) -> dict[str, Any]:
    """What `start_fields` has of the built-in model."""
    return {"dense_arch": resolve_dense_arch(config.model.dense_arch)}


def start_in_words(
    config: Config, protection: Protection, fields: dict[str, Any], steps: int
) -> str:
    """What begins, in one line; `fields` are those of `start_fields`."""
    trained = f"{counted(steps, 'step')} of {counted(config.train.global_batch, 'sample')}"
    arch = f"dense arch {fields['dense_arch']}, "
    return any_start_in_words(config, protection, fields, trained, arch)


def pace(summary: dict[str, Any] | None) -> str:
    """How fast the steps of a run were, and how good its model is; "" without a summary."""
    if summary is None:
        return ""
    auc = "-" if summary["eval_auc"] is None else f"{summary['eval_auc']:.4f}"
    return f"{summary['samples_per_second']:,.0f} samples/s, evaluation auc {auc}"

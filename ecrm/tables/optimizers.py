"""The optimizer of a table's rows, from the marks of `apply_optimizer_in_backward`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torchrec.optim
from torch import nn

from ecrm.base.errors import UsageError
from ecrm.placement.sparse_optimizer import SparseOptimizer

_NAMES: Mapping[type, str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
    torchrec.optim.SGD: "sgd",
    torchrec.optim.Adagrad: "adagrad",
    torchrec.optim.Adam: "adam",
    torchrec.optim.RowWiseAdagrad: "rowwise_adagrad",
}
_FBGEMM_DEFAULTS = {"lr": 0.01, "eps": 1e-8, "betas": (0.9, 0.999), "weight_decay": 0.0}
"""Defaults of SGD, Adagrad and Adam in torchrec.optim, mere names for FBGEMM's optimizers."""

_MEANT = {
    "sgd": {"lr", "weight_decay"},
    "adagrad": {"lr", "eps", "weight_decay"},
    "rowwise_adagrad": {"lr", "eps", "weight_decay"},
    "adam": {"lr", "eps", "betas", "weight_decay", "decoupled_weight_decay"},
}
_HOW_IT_RUNS = {"foreach", "fused", "capturable", "differentiable"}  # without effect on results


def without_optimizer(table: str, path: str) -> UsageError:
    """The error for a table without an optimizer; `path` is its collection's path in the model."""
    parameters = ".".join(part for part in ("model", path, "parameters()") if part)
    return UsageError(
        f"table {table} has no optimizer",
        otherwise="before the session is made, type apply_optimizer_in_backward("
        f'torchrec.optim.RowWiseAdagrad, {parameters}, {{"lr": 0.02}})',
    )


def optimizer_of(table: str, weight: nn.Parameter) -> SparseOptimizer | None:
    """The optimizer of the rows of a table; `None` for a table without one, unfit for training.

    A weight that requires no gradient is frozen: its optimizer changes nothing. A keyword not given
    has the default of torch or torchrec.

    Raises UsageError for several optimizers, and for an optimizer or a keyword unfit for updating
    rows.
    """
    if not weight.requires_grad:
        return SparseOptimizer("sgd", 0.0)
    classes = getattr(weight, "_optimizer_classes", [])
    if not classes:
        return None
    if len(classes) > 1:
        raise UsageError(
            f"table {table} has {len(classes)} optimizers "
            f"({', '.join(kind.__name__ for kind in classes)})",
            otherwise="call apply_optimizer_in_backward once for each parameter",
        )
    return _translated(table, classes[0], weight._optimizer_kwargs[0])  # type: ignore[attr-defined]


def _translated(table: str, kind: type, given: Mapping[str, Any]) -> SparseOptimizer:
    name = _NAMES.get(kind)
    if name is None:
        raise UsageError(
            f"table {table} has the optimizer {kind.__module__}.{kind.__name__}",
            otherwise="take torch.optim.SGD, Adagrad, Adam or AdamW, "
            "or torchrec.optim.RowWiseAdagrad",
        )
    defaults = _defaults(kind)
    for keyword, value in given.items():
        if keyword in _HOW_IT_RUNS or (keyword in _MEANT[name] and keyword in defaults):
            continue
        if keyword not in defaults or value != defaults[keyword]:
            raise UsageError(
                f"table {table}: {kind.__name__} has {keyword}={value!r}, "
                "and rows cannot be updated that way",
                otherwise=f"leave {keyword} out; {kind.__name__} may have "
                f"{', '.join(sorted(_MEANT[name] & defaults.keys()))}",
            )
    chosen = {**defaults, **given}
    if kind is torchrec.optim.Adam and chosen["weight_decay"]:
        raise UsageError(
            f"table {table}: torchrec.optim.Adam has weight_decay={chosen['weight_decay']!r}, "
            "and does not say which kind of decay",
            otherwise="take torch.optim.Adam for L2 or torch.optim.AdamW for decoupled decay",
        )
    numbers: dict[str, Any] = {
        "learning_rate": float(chosen["lr"]),
        "weight_decay": float(chosen["weight_decay"]),
    }
    if "eps" in _MEANT[name]:
        numbers["epsilon"] = float(chosen["eps"])
    if "betas" in _MEANT[name]:
        first, second = chosen["betas"]
        numbers["betas"] = (float(first), float(second))
        numbers["decoupled"] = kind is torch.optim.AdamW or bool(
            chosen.get("decoupled_weight_decay", False)
        )
    return SparseOptimizer(name, **numbers)


def _defaults(kind: type) -> Mapping[str, Any]:
    """The values of an optimizer's keywords, if not given."""
    found = {
        name: parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return found or {
        name: _FBGEMM_DEFAULTS[name] for name in _MEANT[_NAMES[kind]] & {*_FBGEMM_DEFAULTS}
    }

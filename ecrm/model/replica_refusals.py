"""Refusals, by name, of models and states that a replica cannot hold or load."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer, SparseAdam

from ecrm.base.errors import UsageError

KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of trained parameters: gradients are summed as float32, exact for all three."""
FREEZE = (
    "set requires_grad before Session(model, ...); a parameter rests in a step whose before_step "
    "sets its grad to None"
)
FREEZE_ROWS = (
    "set requires_grad before Session(model, ...); to train on with other tables, call "
    "session.save(path), and session.load(path) in another run"
)


def check_parameters(
    named: Mapping[str, nn.Parameter], trained: Mapping[str, Tensor], device: torch.device
) -> None:
    """Raise UsageError for parameters that a replica cannot hold."""
    for name, parameter in named.items():
        if isinstance(parameter, UninitializedParameter):
            raise UsageError(
                f"parameter {name} has no shape yet: call the module on a batch before"
            )
        if parameter.device != device:
            raise UsageError(
                f"parameter {name} is on {parameter.device}: build the model on the CPU"
            )
        if name in trained and parameter.dtype not in KINDS:
            raise UsageError(
                f"parameter {name} is {parameter.dtype}: gradients are summed as float32, "
                "train it as float32, bfloat16 or float16"
            )


def check_buffers(
    buffers: Mapping[str, Tensor | None], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Raise UsageError for a buffer in a parameter's memory: a slot's begin puts buffers back."""
    owners = {_memory(parameter): name for name, parameter in parameters.items()} | {0: None}
    for name, buffer in buffers.items():
        owner = owners.get(_memory(buffer)) if buffer is not None else None
        if owner is not None:
            raise UsageError(
                f"buffer {name} and parameter {owner} have the same memory, so that a step of one "
                "would be undone with the other",
                otherwise=f"register a copy: register_buffer(..., {owner}.detach().clone())",
            )


def check_own_memory(
    state: Iterable[tuple[str, object]], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Raise UsageError for an optimizer's tensor in a parameter's memory: copies would part."""
    owners = {_memory(parameter): name for name, parameter in parameters.items()} | {0: None}
    for name, value in state:
        owner = owners.get(_memory(value)) if isinstance(value, Tensor) else None
        if owner is not None:
            raise UsageError(
                f"the optimizer's state {name} and parameter {owner} have the same memory, and "
                "another rank would have two",
                otherwise="keep a copy in the state: parameter.detach().clone()",
            )


def _memory(tensor: Tensor) -> int:
    """The address of the memory below a tensor; 0 for a tensor without memory."""
    with contextlib.suppress(RuntimeError, NotImplementedError):  # such as a sparse tensor
        return tensor.untyped_storage().data_ptr()
    return 0


def check_steps_alone(optimizer: Optimizer) -> None:
    """Raise UsageError if an optimizer's `step` needs an argument, or sparse gradients."""
    if isinstance(optimizer, SparseAdam):
        raise UsageError(
            "SparseAdam takes sparse gradients alone, and those of slots are summed as dense ones",
            otherwise="give torch.optim.Adam; for rows of a table, put the table into an "
            "EmbeddingBagCollection",
        )
    for name, parameter in inspect.signature(optimizer.step).parameters.items():
        needed = parameter.default is parameter.empty
        if needed and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UsageError(
                f"{type(optimizer).__name__}.step needs a {name}, and slots are computed once a "
                "step: give an optimizer that steps by gradients alone, such as torch.optim.AdamW"
            )


def check_fits(
    there: Mapping[str, Tensor | None], here: Mapping[str, Tensor | None], parameters: Set[str]
) -> None:
    """Raise UsageError with the first tensor that differs between a state and the module.

    For `parameters`, shape and dtype must match; buffers may differ in both.
    """
    another = "the state to be loaded is another model's"
    for name, tensor in here.items():
        theirs = there.get(name)
        if name not in there:
            raise UsageError(f"{another}: it has no {name}")
        if name not in parameters:
            continue
        assert tensor is not None and theirs is not None
        if (theirs.shape, theirs.dtype) != (tensor.shape, tensor.dtype):
            raise UsageError(
                f"{another}: {name} is {list(theirs.shape)} {theirs.dtype} there, "
                f"{list(tensor.shape)} {tensor.dtype} here"
            )
    for name in there:
        if name not in here:
            raise UsageError(f"{another}: it has {name}, which the module here does not have")


def check_rest(
    rest: Mapping[str, Any],
    registered: Collection[str],
    optimizers: Sequence[Mapping[str, Any]],
    scheduler: object,
) -> None:
    """Raise UsageError unless optimizers, scheduler and registered objects fit `rest`.

    `rest` is the part of an exported state besides parameters and buffers. Values are not checked.
    """
    theirs, ours = set(rest["extra"]), set(registered)
    if theirs != ours:
        raise UsageError(
            f"the state to be loaded has registered objects {sorted(theirs)}, "
            f"this script has {sorted(ours)}: register the same ones"
        )
    for saved, live in zip(rest["optimizers"], optimizers):
        for one, other in zip(saved["groups"], live["groups"]):
            if one.keys() != other.keys():
                raise UsageError(
                    "the state to be loaded is another optimizer's: its numbers are "
                    f"{', '.join(sorted(one))}, those of this script's are "
                    f"{', '.join(sorted(other))}: make the optimizer as it was made"
                )
    if (rest["scheduler"] is None) != (scheduler is None):
        there, here = ("without", "with") if scheduler else ("with", "without")
        raise UsageError(
            f"the state to be loaded was made {there} a scheduler, this script is {here} one"
        )

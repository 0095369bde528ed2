"""Whether user code computes a slot twice with the same bits, and the first difference if not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ecrm.base.errors import UsageError
from ecrm.engine.engine import Engine
from ecrm.model.module_replica import ModuleReplica
from ecrm.model.nested_state import same_bits, unpacked
from ecrm.placement.tables import RowSpace
from ecrm.run.step_loop import SlotResult


def check_same(
    place: str,
    first: SlotResult,
    second: SlotResult,
    replica: ModuleReplica,
    spaces: Sequence[RowSpace],
    rows: Sequence[Tensor],
) -> None:
    """Raise UsageError, with the first difference, if two results of the same slot differ.

    `rows` are the row numbers looked up by the slot, by space, int64 [U].
    """
    found = next(_differences(first, second, replica, spaces, rows), "")
    if found:
        raise UsageError(
            f"{place} was computed twice, and {found}",
            otherwise="look for operations without a fixed order, for random numbers that are not "
            "drawn from torch, random or numpy, and for what the loop's body keeps between slots",
        )


def undo_is_tried(engine: Engine, check_steps: int) -> bool:
    """Whether to take, undo and retake the current dense step, if the step follows a commit.

    True in the first `check_steps` steps, and then after 1, 2, 4, 8 and so on commits, to find
    also state changed only by later steps. False if `check_steps` is 0. The same on all ranks.
    """
    if not check_steps:
        return False
    commits, since = divmod(engine.step, engine.state.policy.commit_interval)
    return engine.step < check_steps or (not since and not commits & (commits - 1))


def kept(result: SlotResult) -> SlotResult:
    """Copy a result's gradients, so that the next result of the slot cannot overwrite them."""
    gradients = [gradient.clone() for gradient in result.gradients]
    return replace(result, gradients=gradients)


def _differences(
    first: SlotResult,
    second: SlotResult,
    replica: ModuleReplica,
    spaces: Sequence[RowSpace],
    rows: Sequence[Tensor],
) -> Iterator[str]:
    assert first.contribution is not None and second.contribution is not None
    one_has, other_has = map(replica.flags_of, (first.contribution, second.contribution))
    for name, has in one_has.items():
        if has != other_has[name]:
            yield f"{name} has a gradient one time, the other time none"
    for (name, one), (_, other) in zip(
        replica.parts_of(first.contribution), replica.parts_of(second.contribution), strict=True
    ):
        if not same_bits(one, other):
            yield f"the gradient of {name} differs{_by(one, other)}"
    for space, numbers, one, other in zip(
        spaces, rows, first.gradients, second.gradients, strict=True
    ):
        differ = (one.view(torch.int32) != other.view(torch.int32)).any(1)
        if differ.any():
            place = space.in_words(numbers[differ].tolist())
            yield f"the gradient of {place} differs{_by(one, other)}"
    if (first.state is None) != (second.state is None):
        yield "one time buffers have changed, the other time not"
    elif first.state is not None and second.state is not None:
        one_state, other_state = unpacked(first.state), unpacked(second.state)
        for name in {**one_state, **other_state}:
            # a stream's state has no name, and its bytes may differ for equal states
            if name and not _same(one_state.get(name), other_state.get(name)):
                yield f"buffer {name} differs"
    logged, again = (json.loads(bytes(result.note.tolist())) for result in (first, second))
    for name in {**logged, **again}:
        if str(logged.get(name)) != str(again.get(name)):
            yield f"session.log({name}=...) differs: {logged.get(name)}, {again.get(name)}"


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else same_bits(one, other)


def _by(one: Tensor, other: Tensor) -> str:
    """The largest difference between two gradients, in words."""
    return f", by {float((one - other).abs().max()):.1e} at most"

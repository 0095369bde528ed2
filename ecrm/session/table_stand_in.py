"""The parameter in the place of a table whose rows a session keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ecrm.errors import UsageError


class TableStandIn(nn.Parameter):
    """A parameter on the meta device: name, shape and dtype of a table, and no rows.

    All that torch makes of it is of this class, such as an entry of the module's state_dict. It can
    be copied. Raises UsageError where somebody pickles it, as torch.save does, or moves it to
    another device: it has no numbers.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            # nn.Parameter's own makes plain tensors of what torch gives
            make: Any = Tensor.__torch_function__
            return make.__func__(cls, func, types, args, dict(kwargs or {}))
        except NotImplementedError as error:  # of a tensor on the meta device
            raise _no_rows("has no numbers") from error

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _no_rows("cannot be written")


def stand_in(weight: nn.Parameter) -> TableStandIn:
    """What takes the place of a weight.

    `in_backward_optimizer_filter` still tells it from others, and no optimizer keeps the weight.
    """
    made = TableStandIn(
        torch.empty(weight.shape, dtype=weight.dtype, device="meta"), weight.requires_grad
    )
    made.__dict__.update(weight.__dict__)
    if hasattr(weight, "_in_backward_optimizers"):
        made._in_backward_optimizers = []  # type: ignore[attr-defined]
    return made


def check_loads(table: str, state: Mapping[str, Any], name: str) -> None:
    """Raise UsageError where a state_dict of a module has rows of a table under `name`."""
    values = state.get(name)
    if isinstance(values, Tensor) and not values.is_meta:
        raise UsageError(
            f"load_state_dict of the model cannot set the rows of table {table}, which a session "
            "keeps",
            otherwise="type session.load(path) or session.load_state_dict(state_dict), before the "
            "loop over session.steps",
        )


def check_stays(convert: Callable[[Tensor], Tensor], like: Tensor) -> None:
    """Raise UsageError where `convert` changes the device or dtype of tensors such as `like`."""
    try:
        made = convert(like)
    except Exception as error:
        raise _stays(str(error).partition("\n")[0]) from error
    if (made.device, made.dtype) != (like.device, like.dtype):
        raise _stays(f"to {made.device}, {made.dtype}")


def _stays(problem: str) -> UsageError:
    return UsageError(
        f"a session's model stays on its device and in its dtypes, and was to be moved: {problem}",
        otherwise="leave out .to(...) and .cuda() of session.model, or convert the model before it "
        "is given to the Session",
    )


def _no_rows(problem: str) -> UsageError:
    return UsageError(
        f"a table in the state of session.model {problem}: a session keeps its rows",
        otherwise="type session.save(path), or session.state_dict() on all ranks, after the loop "
        "over session.steps or in a function for session.every",
    )

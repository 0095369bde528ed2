"""The parameter in the place of a table with rows kept by a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from ecrm.base.errors import UsageError

_SAID = frozenset(
    [
        "numel",
        "nelement",
        "size",
        "dim",
        "ndimension",
        "stride",
        "storage_offset",
        "element_size",
        "get_device",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_contiguous",
        "is_pinned",
        "is_shared",
        "is_inference",
        "is_conj",
        "is_neg",
        "is_same_size",
        "is_set_to",
        "has_names",
        "dim_order",
        "data_ptr",
        "untyped_storage",
        "__len__",
        "__hash__",
        "__dlpack_device__",
        "requires_grad_",
        "detach_",
    ]
)
"""Functions that need no numbers of a table."""
_CONVERTS = frozenset(
    [
        "detach",
        "clone",
        "contiguous",
        "to",
        "type",
        "type_as",
        "cpu",
        "cuda",
        "float",
        "double",
        "half",
        "bfloat16",
    ]
)
"""Functions that may return a table unchanged."""
_ARITHMETIC = frozenset(
    ["add", "sub", "mul", "div", "truediv", "lerp", "addcdiv", "addcmul", "copy"]
)
"""Functions for averages of weights, without `_foreach_`, `r`, `i` and underscores."""
_LIKE = frozenset(["empty_like", "zeros_like", "ones_like", "full_like"])
"""Functions used by optimizers to make their state."""
_VIEWS = frozenset(["T", "mT", "H", "mH", "real", "imag"])


class TablePlaceholder(nn.Parameter):
    """A parameter on the meta device: name, shape and dtype of a table, and no rows.

    All tensors made from a stand-in by torch are stand-ins, such as an entry of the module's
    state_dict. A stand-in can be copied. Copies and stand-ins can be averaged with each other, as
    an average of a model's weights does with all parameters.

    Raises UsageError, with the table's name, for any other use or change of numbers, for pickling,
    as by torch.save, and for a move to another device.
    """

    _table = ""
    _is_copy = False  # only a copy may be written

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        tensors = list(_tensors_in((args, given)))
        stand_in = next(tensor for tensor in tensors if isinstance(tensor, TablePlaceholder))
        _check(func, stand_in._table, args, tensors)
        if func.__name__.startswith("_foreach_") and func.__name__.endswith("_"):
            return args[0]  # no numbers to change, and torch would read a tensor argument
        with torch._C.DisableTorchFunctionSubclass():
            try:
                made = func(*args, **given)
            except NotImplementedError as error:  # raised for a tensor on the meta device
                raise _reads(stand_in._table, func.__name__) from error
            converts = func.__name__ in _CONVERTS | _LIKE and isinstance(made, Tensor)
            if converts and (made.device, made.dtype) != (stand_in.device, stand_in.dtype):
                raise _reads(stand_in._table, func.__name__)
            keeps = func.__name__ in ("detach", "__get__")
            return _named(made, stand_in._table, stand_in._is_copy or not keeps)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            made = type(self)(torch.empty_like(self.data.as_subclass(Tensor)), self.requires_grad)
            made.__dict__.update(self.__dict__, _is_copy=True)
            memo[id(self)] = made
        copied: Self = memo[id(self)]
        return copied

    def __repr__(self) -> str:  # type: ignore[override]
        shape = " x ".join(map(str, self.shape))
        return f"table {self._table}, {shape}, whose rows a session keeps"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _reads(self._table, "pickle")


def stand_in(weight: nn.Parameter, table: str) -> TablePlaceholder:
    """The stand-in for the weight of a table; the weight itself is unusable from now on.

    `in_backward_optimizer_filter` still recognizes the stand-in, and no optimizer keeps the weight.
    """
    made = TablePlaceholder(
        torch.empty(weight.shape, dtype=weight.dtype, device="meta"), weight.requires_grad
    )
    made.__dict__.update(weight.__dict__, _table=table)
    if hasattr(weight, "_in_backward_optimizers"):
        made._in_backward_optimizers = []  # type: ignore[attr-defined]
    weight.__class__, weight._table = TablePlaceholder, table  # type: ignore[attr-defined]
    return made


def _check(
    func: Callable[..., Any], table: str, args: tuple[Any, ...], tensors: list[Tensor]
) -> None:
    """Raise UsageError for a function reading or changing numbers of a table."""
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        of = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__set__" and not (of == "requires_grad" or (of == "grad" and args[1] is None)):
            raise changes(table, f"{of} = ...")
        if of in _VIEWS:
            raise _reads(table, of)
        return
    plain = name.removeprefix("_foreach_")
    base = plain.strip("_")
    in_place = plain.endswith("_") and not plain.startswith("__")
    if plain.startswith("__"):
        in_place = base.startswith("i") and base[1:] in _ARITHMETIC
        base = base[1:] if base[:1] in ("i", "r") and base[1:] in _ARITHMETIC else base
    if name in _SAID | _CONVERTS | _LIKE:
        return
    with torch._C.DisableTorchFunctionSubclass():
        without_numbers = all(tensor.is_meta or not tensor.dim() for tensor in tensors)
    if base not in _ARITHMETIC or not without_numbers:
        raise changes(table, name) if in_place or name == "__setitem__" else _reads(table, name)
    if in_place and base != "copy" and any(not each._is_copy for each in _written(args)):
        raise changes(table, name)


def _written(args: tuple[Any, ...]) -> Iterator[TablePlaceholder]:
    """The stand-ins changed in place by a function."""
    return (each for each in _tensors_in(args[:1]) if isinstance(each, TablePlaceholder))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _named(made: Any, table: str, is_copy: bool) -> Any:
    """The result of a torch function on a table, with the table's name."""
    if isinstance(made, (tuple, list)) and not isinstance(made, torch.Size):
        return type(made)(_named(part, table, is_copy) for part in made)
    if not isinstance(made, Tensor) or isinstance(made, TablePlaceholder):
        return made
    named = made.as_subclass(TablePlaceholder)
    named._table, named._is_copy = table, is_copy
    return named


def check_loads(table: str, state: Mapping[str, Any], name: str) -> None:
    """Raise UsageError if a state_dict for a module has rows of a table under `name`."""
    values = state.get(name)
    if isinstance(values, Tensor) and not values.is_meta:
        raise UsageError(
            f"load_state_dict of the model cannot set the rows of table {table}, which a session "
            "keeps",
            otherwise="type session.load(path) or session.load_state_dict(state_dict), before the "
            "loop over session.steps",
        )


def check_stays(convert: Callable[[Tensor], Tensor], like: Tensor) -> None:
    """Raise UsageError if `convert` changes the device or dtype of tensors such as `like`."""
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


def changes(table: str, how: str) -> UsageError:
    """The error for rows of a table changed by anything except the table's optimizer."""
    return UsageError(
        f"table {table} is changed by {how}, and a session keeps its rows",
        otherwise="before the loop over session.steps, give the table an init_fn or call "
        "session.load_state_dict(state_dict); from then on the optimizer of the table changes it",
    )


def _reads(table: str, how: str) -> UsageError:
    return UsageError(
        f"table {table} is used as a tensor, by {how}, and a session keeps its rows",
        otherwise="look rows up through the collection, by ids in a KeyedJaggedTensor, for scores "
        "of all rows in batches of their ids; for the whole table call session.save(path), or "
        "session.state_dict() on all ranks, after the loop over session.steps or in a function "
        "for session.every",
    )

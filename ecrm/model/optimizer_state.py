"""The state of a torch optimizer, by the names of parameters, read and put back in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ecrm.base.errors import UsageError
from ecrm.model.nested_state import placed


class OptimizerState:
    """The `state` of an optimizer and the numbers of its `param_groups`.

    A combined optimizer, with `optimizers` as in torchrec, is taken apart. `names` are the names of
    the allowed parameters, by id. State kept elsewhere by an optimizer is not seen. Raises
    UsageError if the optimizer has a parameter without a name.
    """

    def __init__(self, optimizer: Optimizer | None, names: Mapping[int, str]) -> None:
        self.optimizers = [] if optimizer is None else _plain(optimizer)
        self._names = {**_own_names(self.optimizers), **names}
        for parameter in self._parameters():
            if id(parameter) not in names:
                raise UsageError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is not "
                    "the module's: make it one, by nn.Parameter inside the module"
                )

    def _parameters(self) -> list[Tensor]:
        return [
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    @property
    def kept(self) -> set[int]:
        """The ids of the `state` and `param_groups` objects."""
        return {id(each) for of in self.optimizers for each in (of.state, of.param_groups)}

    def live(self) -> list[dict[str, Any]]:
        """Nested state, one dict per optimizer, with live tensors."""
        return [
            {
                "state": {self._key(key): value for key, value in optimizer.state.items()},
                "groups": groups,
            }
            for optimizer, groups in zip(self.optimizers, self.groups(), strict=True)
        ]

    def groups(self) -> list[list[dict[str, Any]]]:
        """The numbers of the groups, one list per optimizer."""
        return [
            [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            for optimizer in self.optimizers
        ]

    def _key(self, key: Any) -> Any:
        """A parameter's name; non-tensor keys of an optimizer stay as given.

        Raises UsageError for a tensor that is not a parameter of the optimizer.
        """
        if not isinstance(key, Tensor):
            return key
        if id(key) not in self._names:
            raise UsageError(
                f"the optimizer has state for a tensor of shape {list(key.shape)} that is no "
                "parameter of its own: keep that state under the parameters' names"
            )
        return self._names[id(key)]

    def put(self, saved: list[dict[str, Any]]) -> None:
        """Restore a state `saved` from `live`, in place; afterwards nothing of `saved` is shared.

        Raises UsageError if the number of optimizers or parameter groups differs.
        """
        groups = [len(optimizer.param_groups) for optimizer in self.optimizers]
        if groups != [len(each["groups"]) for each in saved]:
            raise UsageError(
                f"the optimizer has {sum(groups)} parameter groups, the state to be loaded has "
                f"{sum(len(each['groups']) for each in saved)}: make the optimizer as it was made"
            )
        own = (p for of in self.optimizers for p in _params_of(of).values())
        by_name: dict[Any, Any] = {self._key(p): p for p in (*own, *self._parameters())}
        for optimizer, each in zip(self.optimizers, saved, strict=True):
            state: Any = optimizer.state
            for key in [key for key in state if self._key(key) not in each["state"]]:
                del state[key]
            for name, value in each["state"].items():
                key = by_name.get(name, name)
                state[key] = placed(_beside(key, value), state.get(key))
            for group, numbers in zip(optimizer.param_groups, each["groups"], strict=True):
                for name in group.keys() - numbers.keys() - {"params"}:
                    del group[name]
                for name, value in numbers.items():
                    group[name] = placed(value, group.get(name))


def _params_of(optimizer: Any) -> Mapping[str, Tensor]:
    """The parameters of a keyed torchrec optimizer, by name; empty for other optimizers."""
    params = getattr(optimizer, "params", None)
    return params if isinstance(params, Mapping) else {}


def _own_names(optimizers: Iterable[Any]) -> dict[int, str]:
    """Names of parameters in keyed optimizers, by id; the parameters may be outside the module."""
    return {
        id(parameter): f"{number} {name}"
        for number, optimizer in enumerate(optimizers)
        for name, parameter in _params_of(optimizer).items()
        if isinstance(parameter, Tensor)
    }


def _beside(key: Any, value: Any) -> Any:
    """State of a parameter, its matrices on the parameter's device; single numbers stay.

    State saved elsewhere may lie on the CPU. torch keeps counts of steps on the CPU.
    """
    if not isinstance(key, Tensor) or not isinstance(value, dict):
        return value
    return {
        name: each.to(key.device) if isinstance(each, Tensor) and each.dim() else each
        for name, each in value.items()
    }


def _plain(optimizer: Any) -> list[Optimizer]:
    """The optimizers inside a combined optimizer, else the optimizer itself."""
    inner = getattr(optimizer, "optimizers", None)
    if not inner:
        return [optimizer]
    return [plain for _, each in inner for plain in _plain(each)]

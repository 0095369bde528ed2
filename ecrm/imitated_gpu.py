"""A GPU imitated in the memory of the CPU, so that code for one is tested without one.

A tensor on it says that it is on `cuda:0`. It refuses what a tensor there cannot do: to be read as
numpy, and to be computed with together with a tensor of the host. It is stricter than a GPU in one
point: an index on the host is refused, too, for behind it hides a copy for which the GPU waits.
Only `to`, `cpu` and `copy_` bring values from one side to the other, and they always copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

IMITATED_GPU = torch.device("cuda", 0)

_SAYS = {
    Tensor.device.__get__: IMITATED_GPU,
    Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
}
_READS_HOST_MEMORY = (Tensor.numpy, Tensor.__array__)


class HostMemoryExpected(RuntimeError):
    """A tensor of the imitated GPU came where only memory of the host will do."""


class ImitatedTensor(Tensor):
    """A tensor on the imitated GPU."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _SAYS:
            return _SAYS[func]
        if func in _READS_HOST_MEMORY:
            raise HostMemoryExpected(f"{_name(func)} of a tensor on {IMITATED_GPU}")
        if func is Tensor.copy_:
            _run(func, args, kwargs)
            return args[0]
        if func in (Tensor.to, Tensor.cpu):
            return _moved(func, args, kwargs)
        if func is torch.sqrt:  # correctly rounded on a GPU; on a CPU torch's own is not
            return _tagged(torch.from_numpy(np.sqrt(_plain(args[0]).numpy())))
        _refuse_mixed(func, [*args, *kwargs.values()])
        device = kwargs.pop("device", None)
        result = _run(func, args, kwargs)
        return result if _is_host(device) else _tagged(result)


class _Factories(TorchFunctionMode):
    """Makes tensors on the imitated GPU where a device is asked for."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return args[0]
        kwargs.pop("pin_memory", None)
        if any(issubclass(kind, ImitatedTensor) for kind in types):
            return func(*args, **kwargs)
        if func is Tensor.to:
            return _moved(func, args, kwargs)
        if not _is_gpu(kwargs.get("device")):
            return func(*args, **kwargs)
        del kwargs["device"]
        result = func(*args, **kwargs)
        # what a tensor is made like may be on the host
        return _tagged(result) if isinstance(result, Tensor) else result


@contextmanager
def imitated_gpu() -> Iterator[torch.device]:
    """Imitate a GPU in this thread. Gives the device.

    Triton interprets kernels that are loaded from now on.
    """
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with _Factories():
        yield IMITATED_GPU


def imitate_gpu() -> None:
    """`imitated_gpu` for the rest of this thread."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _Factories().__enter__()  # type: ignore[no-untyped-call]


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _moved(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """What `to` or `cpu` gives: a copy where the device is another one."""
    tensor: Tensor = args[0]
    given = [torch.device("cpu")] if func is Tensor.cpu else [*args[1:], *kwargs.values()]
    given += [argument.device for argument in given if isinstance(argument, Tensor)]
    was_on_gpu = isinstance(tensor, ImitatedTensor)
    goes_to_gpu = any(map(_is_gpu, given)) or (was_on_gpu and not any(map(_is_host, given)))
    plain = _plain(tensor)
    dtypes = [argument for argument in given if isinstance(argument, torch.dtype)]
    values = plain.to(dtypes[0]) if dtypes else plain
    if values is plain:
        if goes_to_gpu == was_on_gpu:
            return tensor
        values = plain.clone()
    moved: Tensor = _tagged(values) if goes_to_gpu else values
    return moved


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        plain: Tensor = tensor.as_subclass(Tensor) if isinstance(tensor, ImitatedTensor) else tensor
        return plain


def _tagged(result: Any) -> Any:
    if isinstance(result, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return result.as_subclass(ImitatedTensor)
    if isinstance(result, (tuple, list)):
        return type(result)(_tagged(part) for part in result)
    return result


def _refuse_mixed(func: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Refuse tensors of both sides; a single number of the host may be computed with."""
    on_host = [
        tensor
        for tensor in _tensors(arguments)
        if not isinstance(tensor, ImitatedTensor) and tensor.dim()
    ]
    if on_host:
        raise HostMemoryExpected(
            f"{_name(func)} of tensors on {IMITATED_GPU} and a tensor on the host, "
            f"{on_host[0].dtype} {list(on_host[0].shape)}"
        )


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (tuple, list)):
            yield from _tensors(argument)


def _name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", func))


def _is_gpu(device: Any) -> bool:
    return isinstance(device, (torch.device, str)) and torch.device(device).type == "cuda"


def _is_host(device: Any) -> bool:
    return isinstance(device, (torch.device, str)) and torch.device(device).type == "cpu"

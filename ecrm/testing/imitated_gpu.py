"""A GPU imitated in the memory of the CPU, to test GPU code without a GPU.

A tensor on the imitated GPU says that its device is `cuda:0`. The tensor refuses operations that a
GPU tensor refuses: reading as numpy, and computing together with a tensor of the host. In one point
it is stricter than a GPU: an index on the host is refused, too, as the index hides a copy for which
the GPU waits. Only `to`, `cpu` and `copy_` bring values from one side to the other, and all three
always copy.

Memory of the host is pinned, registered, or neither, as with a GPU. Pinning decides whether a copy
is waited for. A copy reaching out of registered memory is refused, as by CUDA.

Gradients of GPU tensors are on the GPU. A parameter gets to the GPU by its `data`, as in torch.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from ecrm.device import imitation
from ecrm.device.copies import Copies
from ecrm.device.imitation import IMITATED_GPU, registered

_SAYS = {
    Tensor.device.__get__: IMITATED_GPU,
    Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
}
_READS_HOST_MEMORY = (Tensor.numpy, Tensor.__array__)
_WAITS_FOR_RESULT = (
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.__float__,
    Tensor.equal,
    torch.equal,
    Tensor.masked_select,
    torch.masked_select,
    Tensor.nonzero,
    torch.nonzero,
    Tensor.unique,
    torch.unique,
)
_TAKES_BOTH = (torch._foreach_copy_, torch._has_compatible_shallow_copy_type)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


_failing: list[str] = []
"""The kind of failure of this process's GPU, if any."""


SMALL = 1 << 16
"""Most bytes that CUDA copies from unpinned memory without waiting."""

_interprets = [False]
"""Whether Triton's variable was set for the imitation."""


def fail_from_now_on(kind: str) -> None:
    """Have every request to the imitated GPU fail from now on, for all of this process.

    `kind`: "memory", no memory is left; "lost", the GPU is gone; "hang", the GPU does nothing any
    more, and a wait for the GPU never ends.
    """
    _failing[:] = [kind]


def works_again() -> None:
    """Undo `fail_from_now_on`."""
    _failing.clear()


def wait_for_gpu() -> None:
    """Wait until the imitated GPU has done its work: at once, unless the GPU hangs."""
    if _failing == ["hang"]:
        _wait_for_ever()


class HostMemoryExpected(RuntimeError):
    """Host memory was needed but a GPU tensor came, or a call mixed tensors of both sides."""


class RegisteredInPart(RuntimeError):
    """Memory of a copy is registered in part, or by two registrations: CUDA refuses the copy."""


class ChangedUnderCopy(RuntimeError):
    """Memory of the host was changed while a copy to the GPU might still read the memory."""


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
        """Handle functions called by name on imitated tensors."""
        kwargs = dict(kwargs or {})
        if func in _SAYS:
            return _SAYS[func]
        _fail_if_told()
        if func in _READS_HOST_MEMORY:
            raise HostMemoryExpected(f"{_name(func)} of a tensor on {IMITATED_GPU}")
        if func is Tensor.copy_:
            return _copied(func, args, kwargs)
        if func in (Tensor.to, Tensor.cpu):
            return _moved(func, args, kwargs)
        if func in _WAITS_FOR_RESULT or _picks_by_mask(func, args):
            wait_for_gpu()
        if func is Tensor.is_pinned:
            return False
        if func is Tensor.tolist:
            return _plain(args[0]).tolist()
        if func is torch.sqrt:  # correctly rounded on a GPU; on a CPU torch's own is not
            return _tagged(torch.from_numpy(np.sqrt(_plain(args[0]).numpy())))
        if func not in _TAKES_BOTH:
            _refuse_mixed(func, [*args, *kwargs.values()])
        device = kwargs.pop("device", None)
        result = _run(func, args, kwargs)
        return _plain(result) if _is_host(device) else _tagged(result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Handle computations with imitated tensors, also inside autograd."""
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
        return _each(result, lambda plain: Tensor._make_subclass(ImitatedTensor, plain))


class ImitatedParameter(ImitatedTensor, nn.Parameter):
    """A parameter of a module moved to the imitated GPU."""


class _Factories(TorchFunctionMode):
    """Makes tensors on the imitated GPU if a call asks for its device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return _pinned(args[0].clone())
        if func is Tensor.is_pinned:
            return _is_registered(args[0])
        if func == _SET_DATA and isinstance(args[1], ImitatedTensor):
            return _become(args[0], args[1])
        if kwargs.pop("pin_memory", False):
            return _pinned(func(*args, **kwargs))
        if any(issubclass(kind, ImitatedTensor) for kind in types):
            return func(*args, **kwargs)
        if func is Tensor.to:
            return _moved(func, args, kwargs)
        if not _is_gpu(kwargs.get("device")):
            return func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor):  # from unpinned memory, and blocking
            wait_for_gpu()
        del kwargs["device"]
        result = func(*args, **kwargs)
        # the result, as of empty_like, may still be on the host
        return _tagged(result) if isinstance(result, Tensor) else result


class ImitatedCopies(Copies):
    """Copies of an imitated GPU. Copies to pinned memory arrive only at the rank's `wait`.

    Until then the pinned memory holds UNFINISHED. Raises ChangedUnderCopy in `wait`.
    """

    UNFINISHED = 0xCB  # no valid row number, and visible in any sum

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._mine = threading.local()  # simulated ranks are threads of one process

    def _queue(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> None:
        for there, here in pieces:
            here.copy_(there, non_blocking=True)
            if here.is_pinned():
                here.fill_(self.UNFINISHED)
                self._begun("down").append((there, here))

    def _empty_like(self, here: Tensor) -> Tensor:
        return torch.empty(here.shape, dtype=here.dtype, device=self.device)

    def _arrive(self, there: Tensor, pieces: Sequence[tuple[Tensor, Tensor]]) -> None:
        for source, target in pieces:
            target.copy_(source, non_blocking=True)
            self._begun("up").append((source, source.clone()))

    def _wait(self) -> None:
        wait_for_gpu()
        down, up = self._begun("down"), self._begun("up")
        self._mine.__dict__.clear()
        for there, here in down:
            here.copy_(there, non_blocking=True)
        for source, then in up:
            if not torch.equal(source, then):
                raise ChangedUnderCopy(
                    f"{source.nbytes} bytes of the host were changed before their copy to "
                    f"{self.device} was waited for"
                )

    def _begun(self, way: str) -> list[tuple[Tensor, Tensor]]:
        begun: list[tuple[Tensor, Tensor]] = self._mine.__dict__.setdefault(way, [])
        return begun


@contextmanager
def imitated_gpu() -> Iterator[torch.device]:
    """Imitate a GPU in this thread. Yields the device.

    Triton interprets kernels loaded meanwhile.
    """
    _begin()
    try:
        with _Factories():
            yield IMITATED_GPU
    finally:
        imitation.end()
        if (
            _interprets[0] and not imitation.imitating()
        ):  # a process started later may have a real GPU
            os.environ.pop("TRITON_INTERPRET", None)
            _interprets[0] = False


def imitate_gpu() -> None:
    """`imitated_gpu` for the rest of this thread."""
    _begin()
    _Factories().__enter__()  # type: ignore[no-untyped-call]


def _begin() -> None:
    imitation.begin(ImitatedCopies)
    if "TRITON_INTERPRET" not in os.environ:
        os.environ["TRITON_INTERPRET"], _interprets[0] = "1", True


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _moved(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The result of `to` or `cpu`: a copy if the device changes."""
    tensor: Tensor = args[0]
    given = [torch.device("cpu")] if func is Tensor.cpu else [*args[1:], *kwargs.values()]
    given += [argument.device for argument in given if isinstance(argument, Tensor)]
    was_on_gpu = isinstance(tensor, ImitatedTensor)
    goes_to_gpu = any(map(_is_gpu, given)) or (was_on_gpu and not any(map(_is_host, given)))
    plain = _plain(tensor)
    dtypes = [argument for argument in given if isinstance(argument, torch.dtype)]
    values = plain.to(dtypes[0]) if dtypes else plain
    stays = goes_to_gpu == was_on_gpu
    if values is plain and not (stays and not kwargs.get("copy")):
        values = plain.clone()
    if not stays:
        _waits_for_copy(plain, goes_to_gpu, goes_to_gpu and bool(kwargs.get("non_blocking")))
    if stays:
        return tensor if values is plain else _tagged(values) if goes_to_gpu else values
    moved: Tensor = _Move.apply(values, goes_to_gpu)  # type: ignore[no-untyped-call]
    return moved


def _copied(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The result of `copy_`. A hung GPU gets the copy, but never makes the copy."""
    target, source = args[:2]
    non_blocking = bool(kwargs.get("non_blocking") or args[2:3] == (True,))
    to_gpu = isinstance(target, ImitatedTensor)
    if to_gpu != isinstance(source, ImitatedTensor):
        _waits_for_copy(source if to_gpu else target, to_gpu, non_blocking)
    if _failing != ["hang"]:
        _run(func, args, kwargs)
    return target  # type: ignore[no-any-return]


def _waits_for_copy(host: Tensor, to_gpu: bool, non_blocking: bool) -> None:
    """Wait for a copy between host and GPU, if a GPU makes the host wait for the copy.

    Raises RegisteredInPart.
    """
    known = _is_registered(host) or (to_gpu and host.nbytes <= SMALL)
    if not (known and non_blocking):
        wait_for_gpu()


def _is_registered(host: Tensor) -> bool:
    begin, end = host.data_ptr(), host.data_ptr() + host.nbytes
    for address, size in list(registered.items()):
        if begin < address + size and address < end:
            if address <= begin and end <= address + size:
                return True
            raise RegisteredInPart(
                f"a copy of {host.nbytes} bytes reaches out of registered memory: "
                f"{max(begin, address) - begin} to {min(end, address + size) - begin} are in it"
            )
    return False


def _pinned(memory: Tensor) -> Tensor:
    """The same tensor; its memory counts as pinned as long as in use."""
    if memory.nbytes:
        registered[memory.data_ptr()] = memory.nbytes
        gone = weakref.finalize(memory.untyped_storage(), registered.pop, memory.data_ptr(), None)
        gone.atexit = False
    return memory


class _Move(torch.autograd.Function):
    """To or from the imitated GPU; gradients go the opposite way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to_gpu: bool) -> Tensor:
        ctx.to_gpu = to_gpu
        plain = _plain(tensor).detach()
        return _tagged(plain) if to_gpu else plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.cpu() if ctx.to_gpu else gradient.to(IMITATED_GPU), None


def _become(tensor: Tensor, value: Tensor) -> None:
    """Set the `data` of a tensor on the host: the same object is on the GPU afterwards."""
    if isinstance(tensor, ImitatedTensor):
        _run(_SET_DATA, (tensor, value), {})
        return
    kind = ImitatedParameter if isinstance(tensor, nn.Parameter) else ImitatedTensor
    new = Tensor._make_subclass(kind, _plain(value).detach(), tensor.requires_grad)
    torch.utils.swap_tensors(tensor, new)


def _picks_by_mask(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether the number of picked elements depends on the content of a mask."""
    if func is not Tensor.__getitem__:
        return False
    places = args[1] if isinstance(args[1], (tuple, list)) else [args[1]]
    return any(place.dtype == torch.bool for place in _tensors(places))


def _fail_if_told() -> None:
    if _failing == ["memory"]:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 0 bytes."
        )
    if _failing == ["lost"]:
        raise torch.AcceleratorError("CUDA error: an imitated GPU has fallen off the bus")


def _wait_for_ever() -> NoReturn:
    """Wait like a C call that never returns. Meanwhile Python threads go on, as under torch."""
    sleep = ctypes.CDLL(None).sleep
    while True:
        sleep(1_000_000)


def _plain(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, ImitatedTensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        plain: Tensor = tensor.as_subclass(Tensor)
        return plain


def _tagged(result: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return _each(result, lambda plain: plain.as_subclass(ImitatedTensor))


def _each(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A result of torch with `change` applied to each tensor not on the GPU."""
    if isinstance(result, Tensor):
        return result if isinstance(result, ImitatedTensor) else change(result)
    if isinstance(result, (tuple, list)):
        parts = [_each(part, change) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    return result


def _refuse_mixed(func: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Refuse tensors of both sides; only a single number of the host is allowed."""
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

"""The Triton kernels, compiled for a GPU that is not there, from calls of their public functions.

A launch is replaced by a compilation. So kernels get just the types, constants and options that a
run on a GPU would give them. Triton's wheel brings NVIDIA's assembler. Nothing is run: results of
calls are not to be used.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ecrm.kernels import dispatch

ARCHITECTURE = 90  # H100 and H200


@dataclass(frozen=True)
class Compiled:
    """One kernel for one set of constants, and what its machine code has."""

    kernel: str
    registers: int
    spilled: int  # bytes stored or loaded because registers ran out
    stack: int  # bytes
    loads: dict[int, int]  # loads from global memory, by width in bits
    stores: dict[int, int]
    float_atomics: int
    fused: int  # multiplications rounded together with an addition
    approximate: list[str]  # instructions that do not round correctly, or flush to zero


class _NoGpu:
    """Stands in for the CUDA driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@contextlib.contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Inside the block kernels are compiled and not run; the list gets each that is new."""
    assert not knobs.runtime.interpret, "the interpreter compiles nothing"
    new: list[Compiled] = []
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        if log.getvalue():  # the assembler's: Triton did not have this kernel yet
            new.append(_measured(self.__name__, kernel.asm["ptx"], log.getvalue()))
        return kernel

    with (
        TemporaryDirectory() as cache,
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(dispatch, "_check_triton"),
    ):
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = cache, True
        driver.set_active(_NoGpu())
        yield new


def compiled(call: Callable[[], object]) -> list[Compiled]:
    """What one call compiles."""
    with compiling() as new:
        call()
    return new


class Launches(TorchFunctionMode):
    """What calls inside the block would launch on a GPU.

    To be used inside of `compiling`, where launches of Triton's kernels do nothing else.
    """

    _NEITHER = (
        *(
            "__get__",
            "data_ptr",
            "dim",
            "element_size",
            "is_contiguous",
            "stride",
            "storage_offset",
        ),
        *("__len__", "numel", "tolist", "empty", "empty_like", "view", "flatten", "expand", "iter"),
        *("__iter__", "unbind", "tensor", "__getitem__", "__int__", "__bool__", "item"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []
        self._patch = mock.patch.object(JITFunction, "run", self._noting(JITFunction.run))

    def __enter__(self) -> Launches:
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        picks = name in ("__getitem__", "__setitem__") and isinstance(args[1], torch.Tensor)
        if picks or name not in self._NEITHER:
            self.launched.append(name)
        return func(*args, **(kwargs or {}))

    def _noting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(kernel: JITFunction, *args: Any, **kwargs: Any) -> Any:
            self.launched.append(kernel.__name__)
            return run(kernel, *args, **kwargs)

        return noted


def _measured(name: str, ptx: str, log: str) -> Compiled:
    def bytes_of(what: str) -> int:
        return sum(map(int, re.findall(rf"(\d+) bytes {what}", log)))

    registers = re.search(r"Used (\d+) registers", log)
    assert registers, f"the assembler said nothing of registers: {log}"
    return Compiled(
        kernel=name,
        registers=int(registers[1]),
        spilled=bytes_of("spill stores") + bytes_of("spill loads"),
        stack=bytes_of("stack frame"),
        loads=_widths(ptx, "ld"),
        stores=_widths(ptx, "st"),
        float_atomics=len(re.findall(r"\b(?:atom|red)\.[.\w]*\.(?:f|bf)\d", ptx)),
        fused=len(re.findall(r"\bfma\.rn\.f(?:32|64)", ptx)),
        approximate=sorted(set(re.findall(r"\b\w+[.\w]*\.(?:approx|full|ftz)\b[.\w]*", ptx))),
    )


def _widths(ptx: str, kind: str) -> dict[int, int]:
    found = re.findall(
        rf"\b{kind}\.global(?:\.[a-z]\w*(?:::\w+)*)*?(?:\.v(\d))?\.[bsuf](\d+)\b", ptx
    )
    return dict(Counter(int(count or 1) * int(bits) for count, bits in found))


def zeros(rows: int, width: int, stride: int | None = None, **options: Any) -> torch.Tensor:
    """A matrix with a row stride."""
    return torch.zeros(rows, stride or width, **options)[:, :width]

"""Kernels as Triton's interpreter is given them, and what each would be compiled for on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton.runtime.interpreter import InterpretedFunction


@contextmanager
def launches(done: bool = True) -> Iterator[set[str]]:
    """The kernels that are launched inside the block, each with all that is compiled in.

    That is the types of its tensors, its constants and its options. Other numbers are not. Launches
    do nothing if they are not `done`.
    """
    seen: set[str] = set()
    run = InterpretedFunction.run

    def noting(kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any):
        given = dict(zip(kernel.arg_names, args, strict=False))
        types = [f"{k}:{v.dtype}" for k, v in given.items() if isinstance(v, torch.Tensor)]
        told = [f"{name}={value}" for name, value in sorted(kwargs.items())]
        seen.add(" ".join([kernel.__name__, *types, *told]).replace("torch.", ""))
        return run(kernel, *args, grid=grid, warmup=warmup or not done, **kwargs)

    with mock.patch.object(InterpretedFunction, "run", noting):
        yield seen

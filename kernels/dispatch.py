"""Which backend runs an operation: chosen by name or by device, never replaced silently."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ecrm.kernels import native

BACKENDS = ("reference", "cpu", "triton")

_taken: dict[str, str] = {}
_on_gpu = ["triton"]


def use_on_gpu(backend: str) -> None:
    """What "auto" takes for CUDA tensors: "triton", or "reference", also "auto" for the former."""
    _on_gpu[0] = "triton" if backend == "auto" else backend


@contextmanager
def used_on_gpu(backend: str | None) -> Iterator[None]:
    """`use_on_gpu` for a while; None changes nothing."""
    before = _on_gpu[0]
    if backend is not None:
        use_on_gpu(backend)
    try:
        yield
    finally:
        _on_gpu[0] = before


def choose(operation: str, backend: str, device: torch.device, has_triton: bool = True) -> str:
    """The backend, one of BACKENDS, that will run `operation` on tensors of `device`.

    "auto" is "cpu" for CPU tensors; for CUDA tensors it is "triton", or "reference" (plain torch
    operations on the GPU) for the few that need no kernel of their own there, and for all once
    `use_on_gpu` says so. Every choice
    is remembered for `taken`. Raises ValueError for an unknown name or one that cannot work on the
    device, OSError where the C++ was not built.
    """
    if backend == "auto":
        on_gpu = _on_gpu[0] if has_triton else "reference"
        chosen = "cpu" if device.type == "cpu" else on_gpu
    else:
        chosen = backend
    if chosen not in BACKENDS:
        raise ValueError(
            f"{operation}: backend {backend!r} is not one of {', '.join(BACKENDS)}, auto"
        )
    if chosen == "cpu" and device.type != "cpu":
        raise ValueError(f"{operation}: backend 'cpu' was given tensors on {device}")
    if chosen == "triton":
        _check_triton(operation, device, has_triton)
    _taken[operation] = f"cpu ({native.instruction_set()})" if chosen == "cpu" else chosen
    return chosen


def taken() -> dict[str, str]:
    """What each operation last ran on, such as {"parity_apply": "cpu (gfni)"}."""
    return dict(_taken)


def _check_triton(operation: str, device: torch.device, has_triton: bool) -> None:
    if not has_triton:
        raise ValueError(
            f"{operation}: no Triton kernel; on a GPU its reference runs as plain torch operations"
        )
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{operation}: backend 'triton' was given CPU tensors; "
            "only TRITON_INTERPRET=1 allows that"
        )

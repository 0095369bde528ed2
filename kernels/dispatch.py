"""The choice of the backend for an operation, by name or by device, never replaced silently."""

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
    """Set the backend that "auto" takes for CUDA tensors: "triton" (or "auto"), or "reference"."""
    _on_gpu[0] = "triton" if backend == "auto" else backend


@contextmanager
def used_on_gpu(backend: str | None) -> Iterator[None]:
    """Call `use_on_gpu` for the time of a block; `None` changes nothing."""
    before = _on_gpu[0]
    if backend is not None:
        use_on_gpu(backend)
    try:
        yield
    finally:
        _on_gpu[0] = before


def choose(operation: str, backend: str, device: torch.device, has_triton: bool = True) -> str:
    """Choose the backend, out of BACKENDS, that runs `operation` on tensors of `device`.

    "auto" takes "cpu" for CPU tensors. For CUDA tensors "auto" takes "triton", or the backend set
    by `use_on_gpu`. Operations without a Triton kernel take "reference" on a GPU: plain torch
    operations. `taken` tells the choice later. Raises ValueError for an unknown backend, or for a
    backend that cannot work on the device; OSError if the C++ was not built.
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
    """The last backend of every operation, such as {"parity_apply": "cpu (gfni)"}."""
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

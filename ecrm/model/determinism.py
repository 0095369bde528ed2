"""Settings that make torch give the same bits for the same step on any rank.

Measured with torch 2.13 on CPUs. At two threads or more, the gradient of `x[ids]` and `index_put_`
with accumulate=True differ from run to run; torch's deterministic algorithms repair both. `sum`,
`sigmoid`, `batch_norm` and `interpolate` differ between one thread and two. Some of MKL's code
paths, such as the path for SSE4.2, multiply matrices to different bits for inputs at different
addresses modulo 16 or more. Random numbers and dropout are the same at any number of threads.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""torch's own tensors begin at multiples of this number of bytes."""
_DEEPEST = 3
"""Levels of nested objects with attributes searched by `aligned`."""

Batch = TypeVar("Batch")


def prepare_torch(threads: int) -> None:
    """Have torch use deterministic algorithms, and `threads` threads: the same on every rank.

    An operation without a deterministic algorithm raises RuntimeError with the operation's name.
    New memory is not filled, unlike torch's default in this mode: filling takes 4 ms for each 4 MB.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def prepare_cuda() -> None:
    """Have torch compute with repeatable bits on a GPU, and in full precision.

    Call before any use of the GPU: cuBLAS reads its variable only once.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    cudnn.benchmark, cudnn.deterministic = False, True


@contextmanager
def prepared_torch(threads: int) -> Iterator[None]:
    """Set torch up by `prepare_torch`, and restore the settings afterwards."""
    threads_before = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    prepare_torch(threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        torch.use_deterministic_algorithms(strict)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def seed_slot(seed: int, step: int, slot: int) -> None:
    """Seed torch's default generators, `random` and numpy's global generator.

    Later random numbers depend only on the three numbers. Of GPUs, only the current one is seeded,
    and only if CUDA is in use.
    """
    key = f"{seed} {step} {slot}".encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    # torch.manual_seed takes 200 us: it looks for other devices
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


@contextmanager
def seeded_aside(seed: int) -> Iterator[None]:
    """Seed the generators of `seed_slot` for a block; afterwards they go on as before."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            seed_slot(seed, 0, 0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def aligned(batch: Batch) -> Batch:
    """A batch with all tensors and numpy arrays at multiples of 64 bytes, copied if need be.

    A batch is nested tuples, lists, dicts, dataclasses, TensorDicts, torchrec's jagged tensors and,
    three levels deep, objects with attributes. Strides are kept. Everything else is left alone,
    also subclasses of Tensor, sparse tensors and tensors computed from tensors with gradients.
    Without a copy, the batch itself is returned; the batch is never changed.
    """
    return _aligned(batch, _DEEPEST)  # type: ignore[no-any-return]


def _aligned(value: Any, levels: int) -> Any:
    if type(value) is Tensor:
        return _aligned_tensor(value)
    if type(value) is np.ndarray:
        return _aligned_array(value)
    if type(value).__name__ == "TensorDict":
        copied = {key: _aligned(part, levels) for key, part in value.items()}
        if all(part is value.get(key) for key, part in copied.items()):
            return value
        return value.clone(recurse=False).update(copied)
    if isinstance(value, dict):
        return _rebuilt(value, value, dict.__setitem__, levels)
    if isinstance(value, list):
        return _rebuilt(value, dict(enumerate(value)), list.__setitem__, levels)
    if isinstance(value, tuple):
        items = [_aligned(item, levels) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        present = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return _rebuilt(value, present, object.__setattr__, levels)
    if type(value).__name__ in ("KeyedJaggedTensor", "JaggedTensor", "KeyedTensor"):
        return _rebuilt(value, vars(value), object.__setattr__, levels)
    if levels and hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type)):
        return _rebuilt(value, vars(value), object.__setattr__, levels - 1)
    return value


def _rebuilt(
    value: Any, parts: dict[Any, Any], put: Callable[[Any, Any, Any], object], levels: int
) -> Any:
    """A shallow copy of `value` with the copied parts; without copied parts, `value` itself."""
    new = {key: _aligned(part, levels) for key, part in parts.items()}
    changed = [key for key, part in new.items() if part is not parts[key]]
    if not changed:
        return value
    result = copy.copy(value)
    for key in changed:
        put(result, key, new[key])
    return result


def _aligned_tensor(tensor: Tensor) -> Tensor:
    in_place = (
        tensor.layout != torch.strided
        or tensor.device.type != "cpu"
        or not tensor.is_leaf
        or not tensor.numel()
        or tensor.data_ptr() % ALIGNMENT == 0
    )
    if in_place:
        return tensor
    shape, strides = tensor.shape, tensor.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = tensor.detach().as_strided((span,), (1,)).clone()
    return memory.as_strided(shape, strides).requires_grad_(tensor.requires_grad)


def _aligned_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    in_place = (
        array.dtype.kind not in "biufc"
        or not array.size
        or array.ctypes.data % ALIGNMENT == 0
        or min(array.strides, default=0) < 0
    )
    if in_place:
        return array
    pairs = zip(array.shape, array.strides, strict=True)
    span = array.itemsize + sum((size - 1) * stride for size, stride in pairs)
    memory = torch.empty(span, dtype=torch.uint8).numpy()
    copied: np.ndarray[Any, Any] = np.ndarray(
        array.shape, array.dtype, memory, strides=array.strides
    )
    copied[...] = array
    return copied

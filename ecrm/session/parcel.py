"""Batches passed between processes, in memory written once."""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ecrm.model.determinism import ALIGNMENT

_HEAD_BYTES = 16


class _Pickler(pickle.Pickler):
    """Leaves the bytes of plain CPU tensors out of the stream."""

    def reducer_override(self, value: Any) -> Any:
        plain = (
            type(value) is Tensor
            and value.layout == torch.strided
            and value.device.type == "cpu"
            and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
        )
        if not plain:
            return NotImplemented
        shape, strides = tuple(value.shape), value.stride()
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = value.as_strided((span if value.numel() else 0,), (1,)).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(memory.numpy()), value.dtype, shape, strides)


def _tensor(
    memory: memoryview, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    if not memory.nbytes:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def packed_into_memory(value: Any) -> int:
    """Write a value into new memory; return the memory's descriptor, to be closed.

    The value must be picklable. Plain tensors on the CPU keep their strides.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [buffer.raw() for buffer in buffers]
    places, end = [], 0
    for part in parts:
        places.append((end, part.nbytes))
        end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    words = pickle.dumps((places, file.getvalue()))
    memory = os.memfd_create("batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, end + len(words) + _HEAD_BYTES)
        with mmap.mmap(memory, 0) as whole:
            for (start, size), part in zip(places, parts, strict=True):
                whole[start : start + size] = part
            whole[end:] = words + len(words).to_bytes(_HEAD_BYTES, "little")
    except BaseException:
        os.close(memory)
        raise
    return memory


def unpacked_from_memory(memory: int) -> Any:
    """Return the packed value; the descriptor may be closed afterwards.

    Tensors of the value lie in that memory, and begin at multiples of 64 bytes.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    whole = memoryview(mmap.mmap(memory, os.fstat(memory).st_size, flags=flags))
    end = len(whole) - _HEAD_BYTES
    size = int.from_bytes(whole[end:], "little")
    places, stream = pickle.loads(whole[end - size : end])
    buffers = [whole[start : start + length] for start, length in places]
    return pickle.loads(stream, buffers=buffers)

"""The numbers and names common to the link in C++ and in Python."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

DOWN, GREETING, UP = 0, 2, 3
OVERHEAD = 64
"""Bytes counted on top of a kept message: empty messages take memory as well."""
MOST_BYTES = 1 << 40
"""The longest message. A longer message was never sent."""
RUN_BYTES = NONCE_BYTES = 16


class Step(IntEnum):
    """The progress of a reception: more bytes needed, an answer needed, or the end."""

    MORE = 0
    ASKS = 1
    PROVED = 2
    REFUSED = 3


class Settings(ctypes.Structure):
    """The times and limits of a link, as `Settings` of link.h.

    `beat`: seconds without a written frame before an acknowledgement is written. `silence`: seconds
    without received bytes before a connection is given up. `greet`: seconds for a connection with
    its greeting. `first_pause` and `longest_pause`: seconds before the next dialling. `window`:
    bytes of copied messages without acknowledgement. `prompt`: bytes of a message acknowledged at
    once.
    """

    _fields_ = (
        ("beat", ctypes.c_double),
        ("silence", ctypes.c_double),
        ("greet", ctypes.c_double),
        ("first_pause", ctypes.c_double),
        ("longest_pause", ctypes.c_double),
        ("window", ctypes.c_uint64),
        ("prompt", ctypes.c_uint64),
    )
    beat: float
    silence: float
    greet: float
    first_pause: float
    longest_pause: float
    window: int
    prompt: int

    def __init__(
        self,
        beat: float = 0.25,
        silence: float = 1.0,
        greet: float = 1.0,
        first_pause: float = 0.002,
        longest_pause: float = 0.05,
        window: int = 16 << 20,
        prompt: int = 64 << 10,
    ) -> None:
        super().__init__(beat, silence, greet, first_pause, longest_pause, window, prompt)


@dataclass(frozen=True)
class Identity:
    """The run, the secret of the run, and a rank; `run` has RUN_BYTES bytes."""

    run: bytes
    secret: bytes
    rank: int

    def __post_init__(self) -> None:
        if len(self.run) != RUN_BYTES:
            raise ValueError(f"run has {len(self.run)} bytes, needed: {RUN_BYTES}")

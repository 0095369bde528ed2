"""The words of a shard's file by name, read without mapping them. Light: no numpy."""

from __future__ import annotations

import struct
from pathlib import Path

SHARD_WORDS = ("committed", "prepared", "base0", "length0", "base1", "length1", "bytes")
"""Names of the words of a shard's file, in their order."""


def read_words(path: Path) -> dict[str, int]:
    """Raises OSError, and ValueError for a file that is too short."""
    data = path.read_bytes()
    if len(data) < 8 * len(SHARD_WORDS):
        raise ValueError(f"{path}: {len(data)} bytes are too few")
    return dict(zip(SHARD_WORDS, struct.unpack_from(f"<{len(SHARD_WORDS)}q", data), strict=True))

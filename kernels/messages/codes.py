"""Codes of parts in a message, and the columns of the tables of `messages`."""

from __future__ import annotations

HEAD = -1
"""A head; its words lie among the heads."""
APART = 1 << 16
"""Added for a tensor outside of the message."""
SHARED = 1 << 17
"""Added for a tensor in the sender's memory: a word tells the offset."""
PICKED = 1 << 18
"""Added for rows in the sender's memory: offset, width and number of rows; the payload picks."""

PART_NUMBERS = 9
"""Numbers of a part to write: see `Part` of cpu.cpp."""
GROUP_NUMBERS = 15
"""Numbers of a run of groups to write: see `Groups` of cpu.cpp."""
CAME_NUMBERS = 8
"""Numbers of a part read: see `Came` of cpu.cpp."""
CODES = 32
"""The most dtypes."""

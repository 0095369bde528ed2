"""The time to wait for the holder of a lock on a file."""

from __future__ import annotations

import os
from pathlib import Path

LIVES_SECONDS, UNSEEN_SECONDS, DYING_SECONDS = 0.5, 5.0, 20.0
"""Longest waits for a holder of the lock.

The three are for a holder running on this machine, a holder not visible on this machine, and a dead
holder on this machine, whose memory the system takes back before the lock.
"""

POLL_SECONDS = 0.02
_PF_EXITING = 0x4  # linux/sched.h


def patience(holder: int) -> float:
    """Seconds to wait for a holder, a process of this machine; 0 stands for an invisible holder."""
    if not holder:
        return UNSEEN_SECONDS
    try:
        fields = Path(f"/proc/{holder}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return DYING_SECONDS
    return DYING_SECONDS if fields[0] == "Z" or int(fields[6]) & _PF_EXITING else LIVES_SECONDS


def holder_of(descriptor: int) -> int:
    """The process holding a flock(2) lock on an open file; 0 if not visible."""
    found = os.fstat(descriptor)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5] == place:
            return max(int(words[4]), 0)
    return 0

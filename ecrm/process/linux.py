"""Linux's data about processes, and the action for this process when its parent ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from pathlib import Path

SHARED_SEGMENT = "/dev/shm/sm_segment."
# looked up at import, to be callable in a child just forked
_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h


def when_parent_ends(number: int) -> None:
    """Have the calling thread get signal `number` as soon as its parent ends; 0 for no signal.

    The parent is the thread that started this process.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def name_process(name: str) -> None:
    """Name the calling thread in `ps` and `top`; from the main thread, the process.

    Linux keeps 15 bytes. The command line stays as typed.
    """
    _prctl(_PR_SET_NAME, name.encode())


def shared_segments(pid: int) -> set[str]:
    """The paths of Open MPI's shared-memory files mapped by a process."""
    try:
        words = Path(f"/proc/{pid}/maps").read_text().split()
    except OSError:
        return set()
    return {word for word in words if word.startswith(SHARED_SEGMENT)}


def session_members(session: int) -> list[int]:
    """The pids of all processes of a session, without zombies."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, its_session = (
                    Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
                )
                if int(its_session) == session and state != "Z":
                    members.append(int(entry))
    return members


def began_at(pid: int) -> float | None:
    """When a process began, in seconds since the epoch; `None` for a missing process or a zombie.

    Exact to a tick of the system, mostly 10 ms, and to changes of the clock since the start.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        awake = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return None
    if fields[0] in ("Z", "X"):
        return None
    return time.time() - awake + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def anonymous_bytes(pid: int) -> int | None:
    """The anonymous memory of a process, in bytes; `None` for a missing process."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return None


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of main memory."""
    kibibytes = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        kibibytes[name] = int(rest.split()[0])
    return kibibytes["MemTotal"] * 1024, kibibytes["MemAvailable"] * 1024

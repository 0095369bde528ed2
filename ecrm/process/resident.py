"""What this process really holds of the machine's memory, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

from ecrm.transport.shared_memory import Lending


def resident_bytes(lending: Lending | None) -> tuple[int, int]:
    """(anonymous memory resident now, with what this process can lend, and the largest resident set ever, with libraries and what it has read of
    what others lend) of this process, in bytes."""
    kibibytes = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("RssAnon", "VmHWM"):
            kibibytes[name] = int(rest.split()[0])
    own = 0 if lending is None else lending.bytes_used
    return kibibytes["RssAnon"] * 1024 + own, kibibytes["VmHWM"] * 1024

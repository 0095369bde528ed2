"""What this process really holds of the machine's memory, as Linux counts it."""

from __future__ import annotations

from pathlib import Path


def resident_bytes() -> tuple[int, int]:
    """(anonymous memory resident now, largest resident set ever, libraries included) of this process, in bytes."""
    kibibytes = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("RssAnon", "VmHWM"):
            kibibytes[name] = int(rest.split()[0])
    return kibibytes["RssAnon"] * 1024, kibibytes["VmHWM"] * 1024

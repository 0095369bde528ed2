"""What this machine does with a process that crashes, and what of its memory it writes out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def why_no_core_files() -> str | None:
    """Why a process that crashes leaves no file in its current folder; None where it does."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if pattern and pattern[0] not in "|/":
        return None
    return f"core dumps go elsewhere: /proc/sys/kernel/core_pattern is {pattern!r}"


def mappings(pid: int) -> Iterator[tuple[range, str, set[str]]]:
    """Addresses, name (as in proc_pid_maps(5)) and VmFlags of what a process has mapped.

    Dumps leave out what has the flag `dd`.
    """
    addresses, name = range(0), ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) (?:\S+ ){3}\d+ *(.*)", line):
            addresses, name = range(int(header[1], 16), int(header[2], 16)), header[3]
        elif line.startswith("VmFlags:"):
            yield addresses, name, set(line.split()[1:])


def flags_of_mapping(pid: int, address: int) -> set[str]:
    """The VmFlags of the mapping that an address is in."""
    return next(flags for addresses, _, flags in mappings(pid) if address in addresses)

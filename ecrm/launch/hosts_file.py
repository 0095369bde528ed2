"""The hosts file: the hosts usable by a run, and the host of each rank.

Reading the file is the only side effect of this module.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ecrm.base.errors import UsageError
from ecrm.base.wording import named

FORM = "a line is NAME [slots=N] [address=ADDRESS], such as node1 slots=2"
# Names become words of a command: no name may look like an option or like shell syntax.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")


@dataclass(frozen=True)
class Host:
    """One line of a hosts file: the name, the number of ranks, and the address of a host."""

    name: str
    slots: int
    address: str


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a file, in the file's order.

    Raises UsageError, with file and line, for any error in the file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--hosts {path}: {error.strerror}; {FORM}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--hosts {path}: not a text file; {FORM}") from None
    hosts: list[Host] = []
    where: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words)
        except ValueError as error:
            raise UsageError(f"{path}:{number}: {error}; {FORM}") from None
        if host.name in where:
            raise UsageError(
                f"{path}:{number}: {host.name} is on line {where[host.name]} already; "
                f"for more ranks on it type one line, {host.name} slots=N"
            )
        where[host.name] = number
        hosts.append(host)
    if not hosts:
        raise UsageError(f"{path}: names no host; {FORM}")
    return hosts


def _host(words: Sequence[str]) -> Host:
    name, *options = words
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a host's name")
    values = {"slots": "1", "address": name}
    given: set[str] = set()
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in values:
            raise ValueError(f"cannot read {option!r}")
        if key in given:
            raise ValueError(f"{key}= is given twice")
        given.add(key)
        values[key] = value
    if not re.fullmatch(r"[1-9][0-9]{0,5}", values["slots"]):
        raise ValueError(f"slots={values['slots']} is not a number from 1 to 999999")
    if not ADDRESS.fullmatch(values["address"]):
        raise ValueError(f"address={values['address']} is not an address")
    return Host(name, int(values["slots"]), values["address"])


def place(hosts: Sequence[Host], ranks: int, path: Path) -> list[Host]:
    """The host of each rank.

    Each host gets one rank in turn, in the file's order. Full hosts are passed over. Raises
    UsageError if the slots are fewer than the ranks.
    """
    slots = sum(host.slots for host in hosts)
    if slots < ranks:
        raise UsageError(
            f"{path}: room for {slots} of the {ranks} ranks of this run; "
            "add hosts, or slots=N behind a name"
        )
    placed: list[Host] = []
    turn = 0
    while len(placed) < ranks:
        turn += 1
        placed += [host for host in hosts if host.slots >= turn]
    return placed[:ranks]


def placement_in_words(placed: Sequence[Host]) -> list[str]:
    """One line per host with ranks, such as "node1: ranks 0, 3"."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(placed):
        ranks.setdefault(host.name, []).append(rank)
    return [f"{name}: {named('rank', of)}" for name, of in ranks.items()]

"""The ways of messages between hosts: one message for each pair of hosts and exchange.

The ranks of a host hand their messages for another host to the *gatherer* of the other host, a rank
of their own host. The gatherer sends one message to the gatherer on the other host, which spreads
the parts:

    rank 0 -+                                       +-> rank 4
    rank 1 -+-> gatherer --> the other's gatherer --+-> rank 5
    rank 2 -+                                       +-> rank 6

A host has a gatherer for every other host, a different rank for each as far as there are ranks. All
ranks compute the same gatherers, from the live ranks of an epoch. A death ends the calls of all
ranks, so a dead gatherer is replaced with the next epoch, as every dead rank.

Long memory does not take this way: it goes straight to the rank that needs the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAST_RANKS = 32
"""Ranks of both hosts from which on messages are gathered.

With 16 ranks the hops cost more than the messages saved (docs/decisions/links.md).
"""


@dataclass(frozen=True)
class FarHost:
    """Another host: its live `ranks`, and the gatherers of both hosts for each other."""

    ranks: tuple[int, ...]
    gatherer: int
    theirs: int


@dataclass(frozen=True)
class Routes:
    """The ways of a rank's messages in an epoch.

    `here` are the live ranks of the host, this rank included. `direct` are other ranks with a
    message of their own. `far` are the hosts with gathered messages.
    """

    here: tuple[int, ...]
    direct: tuple[int, ...]
    far: tuple[FarHost, ...]


def routes(rank: int, live: Sequence[int], host_of: Mapping[int, Any], least: int) -> Routes:
    """The routes of a rank among `live` ranks, each with its host.

    Messages of two hosts are gathered if both have `least` live ranks.
    """
    hosts: dict[Any, list[int]] = {}
    for each in live:
        hosts.setdefault(host_of[each], []).append(each)
    numbers = {host: number for number, host in enumerate(hosts)}
    mine = host_of[rank]
    here = hosts[mine]
    far = tuple(
        FarHost(
            tuple(ranks),
            here[numbers[host] % len(here)],
            ranks[numbers[mine] % len(ranks)],
        )
        for host, ranks in hosts.items()
        if host != mine and min(len(here), len(ranks)) >= least
    )
    gathered = {each for host in far for each in host.ranks}
    direct = tuple(each for each in live if each != rank and each not in gathered)
    return Routes(tuple(here), direct, far)


def joined(stamp: int, messages: Sequence[np.ndarray]) -> np.ndarray:
    """Messages of uint8 in one: a stamp, the length of each, and each from a multiple of 8 on."""
    lengths = np.array([stamp, *(len(message) for message in messages)], np.int64)
    starts = np.cumsum([lengths.nbytes, *((lengths[1:] + 7) & -8)]).tolist()
    whole = np.zeros(starts[-1], np.uint8)
    whole[: lengths.nbytes] = lengths.view(np.uint8)
    for message, start in zip(messages, starts):
        whole[start : start + len(message)] = message
    return whole


def parted(whole: np.ndarray, count: int) -> list[np.ndarray]:
    """The `count` messages of `joined`, as views."""
    lengths = whole[8 : 8 * (1 + count)].view(np.int64)
    starts = np.cumsum([8 * (1 + count), *((lengths + 7) & -8)]).tolist()
    return [whole[start : start + length] for start, length in zip(starts, lengths.tolist())]

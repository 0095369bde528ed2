"""Defects of links, membership and transport, one at a time, for the simulator to find.

The defects of the link are in the reference, which writes the same bytes as the C++.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ecrm.kernels.links import DOWN, reference
from ecrm.testing.simulated_transport import link_cluster
from ecrm.testing.simulated_transport.link_carrier import SimulatedCarrier
from ecrm.transport import links, membership
from ecrm.transport.links import LinkTransport

Patch = Callable[[pytest.MonkeyPatch], None]


def _of_link(name: str, make: Callable) -> Patch:
    """A defect in a method of the reference; `make` gets the right method."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(link_cluster, "links", reference)
        monkeypatch.setattr(reference.Link, name, make(getattr(reference.Link, name)))

    return patch


def _drops_acknowledgements(right: Callable) -> Callable:
    return lambda self, until: until <= self.sent


def _replays_one_message_late(right: Callable) -> Callable:
    def up(self, now, expected, partial):
        begun = right(self, now, expected, partial)
        self._next = min(1, len(self._kept)) if self.losses else 0
        return begun

    return up


def _forgets_messages(right: Callable) -> Callable:
    def broke(self, now):
        if self.state != DOWN:
            while self._kept:
                data = self._kept.popleft()[1]
                self.kept_bytes -= len(data) + reference.OVERHEAD if isinstance(data, bytes) else 0
        right(self, now)

    return broke


def _takes_a_message_twice(right: Callable) -> Callable:
    def begin_frame(self):
        kind, number, size, offset, ack = reference.FRAME.unpack(self._head)
        if kind == reference.DATA and 0 < number < self.expected and offset == 0:
            self._head = reference.FRAME.pack(kind, self.expected, size, offset, ack)
        return right(self)

    return begin_frame


def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "HEAD_PATIENCE", 0.1)


def _nobody_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "chosen", lambda pairs: set())


def _first_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "chosen", lambda pairs: {min(pair) for pair in pairs})


def _states_without_revocation(monkeypatch: pytest.MonkeyPatch) -> None:
    right = membership.Head._say

    def say(self, rank, kind, life=None, **fields):
        if kind == "state":
            fields["revoked"] = False
        right(self, rank, kind, life, **fields)

    monkeypatch.setattr(membership.Head, "_say", say)


def _wishes_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("REPEAT_SECONDS", "ASK_SECONDS", "LONGEST_JOIN_PAUSE"):
        monkeypatch.setattr(membership, pause, 1e9)


def _nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedCarrier, "flush", lambda self, seconds, away=(): True)


def _one_round_less(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LinkTransport.agree_alike

    def agree_alike(self, flag, word):
        live = self.live
        self.live = tuple(rank for rank in live if rank == self.rank or rank != live[-1])
        try:
            return right(self, flag, word) if self.rank != live[-1] else (flag, True)
        finally:
            self.live = live

    monkeypatch.setattr(LinkTransport, "agree_alike", agree_alike)


def _parts_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    right = links.parted
    monkeypatch.setattr(links, "parted", lambda whole, count: right(whole, count)[::-1])


LINK_DEFECTS: dict[str, Patch] = {
    "acknowledgements are dropped": _of_link("_acknowledge", _drops_acknowledgements),
    "a replay begins one message late": _of_link("_up", _replays_one_message_late),
    "a broken connection costs its messages": _of_link("broke", _forgets_messages),
    "a repeated message counts again": _of_link("_begin_frame", _takes_a_message_twice),
    "lent memory is not waited for": _nothing_is_waited_for,
    "the head is less patient than the lease": _patience,
    "nobody is given up after a cut": _nobody_is_chosen,
    "both hosts of a cut may be chosen": _first_of_a_pair,
    "a lost revocation is not made up for": _states_without_revocation,
    "a lost wish is not repeated": _wishes_are_not_repeated,
    "an agreement leaves a rank out": _one_round_less,
    "gathered messages go to the wrong ranks": _parts_change_places,
}

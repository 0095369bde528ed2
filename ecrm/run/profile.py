"""The time spent on each part of a step, in milliseconds.

The profile has the time by phase, and inside a phase the time in calls of the transport. Every rank
keeps the spans of its own phases and calls. At the end the reporter gets the spans of all ranks,
prints a table, and writes a trace for chrome://tracing and ui.perfetto.dev.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ecrm.transport.base import Transport, WrappedTransport
from ecrm.transport.membership import Admit
from ecrm.transport.message import Part, Received, json_part, of_json_part

TRACED_SPANS = 20_000
"""The most spans of each rank in the trace, the last spans; the table counts all spans."""

STEP_PHASES = (
    "input",
    "lookup",
    "repair",
    "forward",
    "backward",
    "update",
    "parity",
    "dense",
    "commit",
)


@dataclass
class _Sums:
    """One phase on one rank: count of begins, seconds, seconds in the transport, bytes sent."""

    count: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    sent: int = 0


@dataclass
class Profile:
    """One rank's times. A phase lasts until the next phase begins, or until a step is finished."""

    rank: int
    sums: dict[str, _Sums] = field(default_factory=lambda: defaultdict(_Sums))
    _spans: deque[tuple[str, float, float, int]] = field(
        default_factory=lambda: deque(maxlen=TRACED_SPANS)
    )
    _open: tuple[str, float, int] | None = None

    def phase(self, step: int, name: str) -> None:
        """Begin the phase `name`, and end the phase before."""
        now = time.perf_counter()
        self._close(now)
        self._open = (name, now, step)
        self.sums[name].count += 1

    def step_finished(self) -> None:
        """End the phase; the time until the next phase begins belongs to no phase."""
        self._close(time.perf_counter())

    def _close(self, now: float) -> None:
        if self._open is not None:
            name, since, step = self._open
            self.sums[name].seconds += now - since
            self._spans.append((name, since, now, step))
            self._open = None

    def call(self, name: str, since: float, sent: int) -> None:
        """Record a finished call of the transport.

        The call began at `since` of time.perf_counter(), and gave `sent` bytes to other ranks.
        """
        now = time.perf_counter()
        step = -1
        if self._open is not None:
            sums = self.sums[self._open[0]]
            sums.waiting += now - since
            sums.sent += sent
            step = self._open[2]
        self._spans.append((f"transport.{name}", since, now, step))

    def to_json(self) -> dict[str, Any]:
        """The whole profile, of kinds that JSON has; times since the epoch."""
        offset = time.time() - time.perf_counter()
        sums = {name: [s.count, s.seconds, s.waiting, s.sent] for name, s in self.sums.items()}
        spans = [
            (name, begin + offset, end - begin, step) for name, begin, end, step in self._spans
        ]
        return {"sums": sums, "spans": spans}


class ProfiledTransport(WrappedTransport):
    """A wrapper around a transport, timing every call."""

    def __init__(self, inner: Transport, profile: Profile) -> None:
        super().__init__(inner)
        self._profile = profile

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> Mapping[int, list[Received]]:
        with self._timed("exchange"):
            return self.inner.exchange(outgoing)

    def share(self, tensors: Sequence[Part]) -> Mapping[int, list[Received]]:
        with self._timed("share"):
            return self.inner.share(tensors)

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        with self._timed("agree"):
            return self.inner.agree_alike(flag, word)

    def shrink(self, admit: Admit = Admit.NO) -> None:
        with self._timed("shrink"):
            self.inner.shrink(admit)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        since, sent = time.perf_counter(), self.inner.sent_bytes
        try:
            yield
        finally:
            self._profile.call(name, since, self.inner.sent_bytes - sent)


def gather_profiles(
    profile: Profile, transport: Transport, to: int
) -> dict[int, dict[str, Any]] | None:
    """Collective: every rank's profile on rank `to`, `None` elsewhere.

    Raises PeerFailure like every transport call.
    """
    received = transport.exchange({to: [json_part(profile.to_json())]})
    if transport.rank != to:
        return None
    return {rank: of_json_part(part) for rank, (part,) in received.items()}


def table(profiles: Mapping[int, Mapping[str, Any]], steps: int) -> str:
    """Milliseconds and kilobytes of an average step, by phase, as text.

    Milliseconds are the mean over ranks, the time of the slowest rank, and the part in the
    transport.
    """
    names = list(
        dict.fromkeys((*STEP_PHASES, *(name for p in profiles.values() for name in p["sums"])))
    )
    head = ("phase", "ms a step", "slowest rank", "in transport", "kB sent")
    rows: list[tuple[str, ...]] = []
    totals = [0.0] * 3
    for name in names:
        of_ranks = [
            (rank, p["sums"].get(name, (0, 0.0, 0.0, 0))) for rank, p in sorted(profiles.items())
        ]
        if not any(sums[0] for _, sums in of_ranks):
            continue
        ms = sum(sums[1] for _, sums in of_ranks) / len(of_ranks) / steps * 1e3
        waiting = sum(sums[2] for _, sums in of_ranks) / len(of_ranks) / steps * 1e3
        sent = sum(sums[3] for _, sums in of_ranks) / len(of_ranks) / steps / 1e3
        rank, slowest = max(of_ranks, key=lambda entry: entry[1][1])
        rows.append(
            (
                name,
                f"{ms:.3f}",
                f"{slowest[1] / steps * 1e3:.3f} (rank {rank})",
                f"{waiting:.3f}",
                f"{sent:.1f}",
            )
        )
        totals = [total + part for total, part in zip(totals, (ms, waiting, sent), strict=True)]
    rows.append(("all", f"{totals[0]:.3f}", "", f"{totals[1]:.3f}", f"{totals[2]:.1f}"))
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    )


def chrome_trace(profiles: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The spans of all ranks in Chrome's trace event format: a process for each rank, in µs."""
    events: list[dict[str, Any]] = []
    first = min((span[1] for p in profiles.values() for span in p["spans"]), default=0.0)
    for rank, profile in sorted(profiles.items()):
        events.append(
            {
                "ph": "M",
                "name": "process_name",
                "pid": rank,
                "tid": 0,
                "args": {"name": f"rank {rank}"},
            }
        )
        for name, begin, seconds, step in profile["spans"]:
            call = name.startswith("transport.")
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": "transport" if call else "phase",
                    "pid": rank,
                    "tid": 0,
                    "ts": (begin - first) * 1e6,
                    "dur": seconds * 1e6,
                    "args": {"step": step},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}

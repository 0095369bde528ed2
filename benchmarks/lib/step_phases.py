"""Where the milliseconds of a step go, from the trace that `--profile` leaves."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecrm.run.profile import STEP_PHASES


def phases(trace: Path, first: int) -> dict[str, dict[str, float]]:
    """{phase: milliseconds a step} of the steps from `first` on.

    Each phase has the mean over ranks, the slowest rank, and the part of the mean that is in the
    transport. Calls of the transport count for the phase that they lie in.
    """
    events = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["ph"] == "X" and event["args"]["step"] >= first
    ]
    ranks, steps = (
        {event["pid"] for event in events},
        len({event["args"]["step"] for event in events}),
    )
    took, waited = Counter[tuple[str, int]](), Counter[str]()
    for rank in ranks:
        mine = sorted(
            (event for event in events if event["pid"] == rank),
            key=lambda event: (event["ts"], event["cat"] == "transport"),
        )
        phase: Mapping[str, Any] | None = None
        for event in mine:
            if event["cat"] == "phase":
                phase = event
                took[event["name"], rank] += event["dur"]
            elif phase is not None and event["ts"] < phase["ts"] + phase["dur"]:
                waited[phase["name"]] += event["dur"]
    per_step = 1e3 * steps
    return {
        name: {
            "mean_ms": sum(took[name, rank] for rank in ranks) / len(ranks) / per_step,
            "slowest_rank_ms": max(took[name, rank] for rank in ranks) / per_step,
            "in_transport_ms": waited[name] / len(ranks) / per_step,
        }
        for name in STEP_PHASES
        if any(took[name, rank] for rank in ranks)
    }

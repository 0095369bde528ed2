"""Ratios of contenders within one round, from the CSV files, and the bars for them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

STEP_BARS = [
    ("dense-heavy", "erasure", "none", 0.99),
    ("embedding-heavy", "erasure", "none", 0.96),
    ("embedding-heavy", "erasure-16", "none", 0.97),
    ("dense-heavy", "erasure", "torchrec", 1.0),
    ("embedding-heavy", "erasure", "torchrec", 1.0),
]
"""(regime, contender, the other, least samples/s of the first over the other's).

torchrec is the fastest of its plans in that round.
"""

STEP_FORMER = {"none-fbgemm"}
"""Contenders of step.csv that bench_step.py had once; tables and pictures leave their rows out."""

SESSION_BARS = [
    ("dense-heavy", 1, "session", "torchrec", 1.3),
    ("dense-heavy", 20, "session", "torchrec", 1.2),
    ("dense-heavy", 1, "session-dot", "torchrec", 1.3),
    ("dense-heavy", 20, "session-dot", "torchrec", 1.2),
    ("dense-heavy", 1, "session-dot", "trainer-0.2.0", 0.98),
    ("embedding-heavy", 1, "session", "torchrec", 2.2),
    ("embedding-heavy", 20, "session", "torchrec", 1.3),
    ("embedding-heavy", 1, "session-dot", "torchrec", 2.2),
    ("embedding-heavy", 20, "session-dot", "torchrec", 1.3),
    ("embedding-heavy", 1, "session-dot", "trainer-0.2.0", 0.98),
]
"""(regime, ids per bag, a session, the other, least samples/s of the session over the other's).

torchrec is the fastest of its plans in that round.
"""

KERNEL_BARS = {
    "isa-l contiguous": 1.0,
    "no-arithmetic": 1.25,
    "without-delta": 1.15,
    "merged-after": 1.0,
    "fbgemm": 1.0,
    "torchrec": 1.0,
    "isa-l": 1.0,
    "torch": 1.0,
}
"""Greatest time of our kernel over that of each contender."""

KEPT_BAR = 0.90
"""Least throughput while rebuilding over that before the kill."""


def step_ratios(rows: Sequence[Row], regime: str, one: str, other: str) -> list[float]:
    """Samples per second of `one` over those of `other`, by round of step.csv that has both.

    Where a contender was interleaved with `none`, its ratio to `none` is that of interleaved runs.
    """
    rounds: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["regime"] == regime:
            rounds.setdefault(str(row["round"]), {})[row["contender"]] = row
    found = []
    for mine in rounds.values():
        others = [
            float(row["samples_per_second"])
            for name, row in mine.items()
            if name == other or (other == "torchrec" and name.startswith("torchrec-"))
        ]
        if one in mine and others:
            in_turns = mine[one].get("over_none_in_turns") if other == "none" else None
            found.append(
                float(in_turns)
                if in_turns
                else float(mine[one]["samples_per_second"]) / max(others)
            )
    return found


def session_ratios(
    rows: Sequence[Row], regime: str, ids_per_bag: int, session: str, other: str
) -> list[tuple[float, float, float]]:
    """Samples per second of a session over those of the other, by round of session.csv.

    Each is the 20th percentile, the median and the 80th percentile over the turns of the round.
    """
    rounds: dict[str, list[Row]] = {}
    for row in rows:
        name = row["contender"]
        if (row["regime"], int(row["ids_per_bag"]), row["session"]) == (
            regime,
            ids_per_bag,
            session,
        ) and (name == other or (other == "torchrec" and name.startswith("torchrec-"))):
            rounds.setdefault(str(row["round"]), []).append(row)
    fastest = [
        min(found, key=lambda row: float(row["session_over_this"])) for found in rounds.values()
    ]
    fields = ("session_over_this_p20", "session_over_this", "session_over_this_p80")
    return [tuple(float(row[field]) for field in fields) for row in fastest]


def scaling_ratios(rows: Sequence[Row], series: str) -> dict[int, list[float]]:
    """Step time at each value of a series of scaling.csv over that at its first value, by round."""
    mine = [row for row in rows if row["series"] == series]
    first = {str(row["round"]): float(row["step_ms"]) for row in reversed(mine)}
    found: dict[int, list[float]] = {}
    for row in mine:
        found.setdefault(int(row["value"]), []).append(
            float(row["step_ms"]) / first[str(row["round"])]
        )
    return found


def median_spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Least, median and greatest."""
    return min(values), statistics.median(values), max(values)

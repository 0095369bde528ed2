"""What protections.csv says of each protection beside the others, and the targets (bars).

Pure functions: rows in, values out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lib.ratios import Row, median_spread

BASELINES = (
    "checkpoint-30-sync",
    "checkpoint-60-sync",
    "checkpoint-30-async",
    "checkpoint-60-async",
)
OURS = "erasure-k4"
CUT_BAR, FASTER_BAR, DROP_BAR, MEMORY_BAR = 0.90, 20.0, 0.10, 0.2501


@dataclass(frozen=True)
class Bar:
    """A target and what was measured: `values` of the rounds.

    It is met if their median meets it or, with `always`, if the worst of them does.
    """

    regime: str
    what: str
    values: tuple[float, ...]
    bar: float
    at_least: bool
    always: bool = False

    @property
    def met(self) -> bool:
        return self._all_meet if self.always else self._meets(statistics.median(self.values))

    @property
    def verdict(self) -> str:
        """In words; what is met by some only is no more than that."""
        return ("met" if self._all_meet else "met by the median only") if self.met else "not met"

    @property
    def _all_meet(self) -> bool:
        return all(map(self._meets, self.values))

    def _meets(self, value: float) -> bool:
        return value >= self.bar if self.at_least else value < self.bar

    def __str__(self) -> str:
        least, middle, most = median_spread(self.values)
        found = f"{middle:.3f} ({least:.3f} to {most:.3f})"
        bar = f"{'at least' if self.at_least else 'below'} {self.bar:g}"
        return f"{self.regime:>15} {self.what}: {found}, bar {bar}: {self.verdict}"


def by_round(rows: Sequence[Row], field: str) -> dict[tuple[str, str], dict[str, float]]:
    """{(regime, contender): {round: value}} of a column, where it has one."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if str(row[field]) != "":
            found.setdefault((row["regime"], row["contender"]), {})[str(row["round"])] = float(
                row[field]
            )
    return found


def overheads(rows: Sequence[Row]) -> dict[tuple[str, str], list[float]]:
    """{(regime, contender): overhead without failures, of each start in each round}.

    Only what was measured is there. The overhead is a step's time beside one of `none` in
    interleaved runs, less 1. With checkpoints, the share by which waiting for one lengthens an
    interval is added.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if str(row["overhead"]) != "":
            starts = str(row.get("overhead_by_start") or row["overhead"])
            found.setdefault((row["regime"], row["contender"]), []).extend(
                map(float, starts.split())
            )
    return found


def equal_models(rows: Sequence[Row]) -> dict[tuple[str, str], list[bool]]:
    """{(regime, contender): whether the finished model is the undisturbed one, by round}.

    The undisturbed run is one of `none` with as many steps.
    """
    found: dict[tuple[str, str], list[bool]] = {}
    for row in rows:
        found.setdefault((row["regime"], row["contender"]), []).append(
            row["model_sha256"] == row["undisturbed_sha256"]
        )
    return found


def auc_differences(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """{(regime, contender): final AUC less that of `none`}, of rows of protections_accuracy.csv."""
    # ascending steps: the last stays
    last = {
        (row["regime"], row["contender"]): float(row["auc"]) for row in rows if row["auc"] != ""
    }
    return {
        (regime, name): value - last[regime, "none"]
        for (regime, name), value in last.items()
        if (regime, "none") in last
    }


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The targets of erasure (k=4, m=1) against checkpoints, by regime.

    Ratios of lost time are of the same round. The cut compares each start's overhead with the
    median overhead of checkpoints.
    """
    costs, equal, found = overheads(rows), equal_models(rows), []
    lost, kept = by_round(rows, "lost_ms"), by_round(rows, "kept_recovering")
    for regime in dict.fromkeys(row["regime"] for row in rows):
        ours = regime, OURS
        for baseline in BASELINES:
            theirs = regime, baseline
            if ours in costs and theirs in costs:
                other = statistics.median(costs[theirs])
                # nothing to cut, as far as could be measured
                cuts = tuple(1 - start / other for start in costs[ours]) if other > 0 else (0.0,)
                found.append(
                    Bar(
                        regime,
                        f"overhead saved against {baseline}, as a share",
                        cuts,
                        CUT_BAR,
                        True,
                    )
                )
            rounds = [number for number in lost.get(ours, ()) if number in lost.get(theirs, ())]
            if rounds:
                faster = tuple(lost[theirs][number] / lost[ours][number] for number in rounds)
                found.append(
                    Bar(
                        regime,
                        f"lost progress of {baseline} / that of {OURS}",
                        faster,
                        FASTER_BAR,
                        True,
                    )
                )
        if ours in kept:
            drop = tuple(1 - value for value in kept[ours].values())
            found.append(
                Bar(
                    regime,
                    f"{OURS}: drop of samples/s while recovering, gap included",
                    drop,
                    DROP_BAR,
                    False,
                )
            )
        if ours in equal:
            found.append(
                Bar(
                    regime,
                    f"{OURS}: share of runs with the undisturbed model",
                    tuple(map(float, equal[ours])),
                    1.0,
                    True,
                    always=True,
                )
            )
        held = tuple(redundancy(row) for row in rows if (row["regime"], row["contender"]) == ours)
        if held:
            found.append(
                Bar(
                    regime,
                    f"{OURS}: redundancy / rows, in bytes",
                    held,
                    MEMORY_BAR,
                    False,
                    always=True,
                )
            )
    return found


def redundancy(row: Row) -> float:
    """Bytes that a run kept beside each byte of its rows, in the memory of other ranks."""
    return float(row["redundancy_bytes"]) / float(row["rows_bytes"])


def summary_lines(rows: Sequence[Row]) -> list[str]:
    """One line for each regime and contender: medians over the rounds."""
    costs, equal = overheads(rows), equal_models(rows)
    columns = {
        field: by_round(rows, field)
        for field in (
            "lost_ms",
            "lost_whole_ms",
            "redone_steps",
            "whole_after_s",
            "kept_recovering",
        )
    }
    lines = []
    for key in dict.fromkeys((row["regime"], row["contender"]) for row in rows):
        parts = [f"{key[0]:>15} {key[1]:<24}"]
        if key in costs:
            parts.append(f"overhead {statistics.median(costs[key]):+7.1%}")
        for field, values in columns.items():
            parts.append(
                f"{field} {statistics.median(values[key].values()):,.2f}" if key in values else ""
            )
        parts.append(f"equal {sum(equal[key])}/{len(equal[key])}" if key in equal else "")
        lines.append("  ".join(part for part in parts if part))
    return lines

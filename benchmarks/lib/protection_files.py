"""The CSV files of bench_protections.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib import measure
from lib.contenders import CONTENDERS, FULL_EVERY
from lib.table_rows import TableError, read_rows

REGIMES = ("dense-heavy", "embedding-heavy", "criteo")
KINDS = ("", "_bytes", "_size", "_accuracy", "_timeline")


class Files:
    """The CSV files, written whenever rows are added: a run that is cut off leaves what it has.

    Rows of other regimes than `regimes` stay, and with `keep` those of these. `part` is the only
    kind measured anew: all others stay. Raises TableError for a file that is empty, and where rows
    to add to are of another machine, torch or Open MPI.
    """

    def __init__(
        self, folder: Path, regimes: Sequence[str], keep: bool = False, part: str | None = None
    ) -> None:
        self._folder, self._about = folder, measure.device()
        self.rows: dict[str, list[dict[str, Any]]] = {
            kind: [
                row
                for row in read_rows(folder / f"protections{kind}.csv") or ()
                if keep or part not in (None, kind) or row["regime"] not in regimes
            ]
            for kind in KINDS
        }
        commits = set()
        for row in (
            row
            for kind in KINDS
            for row in self.rows[kind]
            if keep and row["regime"] in regimes and row.get("device")
        ):
            for field in ("device", "cores", "torch", "openmpi"):
                if row[field] != str(self._about[field]):
                    raise TableError(
                        f"--add: what there is of {row['regime']} was measured with {field} "
                        f"{row[field]}, not {self._about[field]}: measure it without --add"
                    )
            commits.add(row["ecrm_commit"])
        if others := commits - {self._about["ecrm_commit"]}:
            print(
                f"adding to rounds of {', '.join(sorted(others))}: medians are over those and "
                f"these, of {self._about['ecrm_commit']}",
                flush=True,
            )

    def add(self, kind: str, rows: Sequence[dict[str, Any]]) -> None:
        for row, there in (
            (row, there)
            for row in rows
            for there in self.rows[kind]
            if kind == "" and row["contender"] == there["contender"]
        ):
            if row["regime"] == there["regime"] and str(row.get("rows_bytes")) != str(
                there.get("rows_bytes")
            ):
                raise TableError(
                    f"--add: what there is of {row['regime']} has {there['rows_bytes']} bytes of "
                    f"rows, not {row['rows_bytes']}: measure it without --add"
                )
        self.rows[kind] += [{**row, **self._about} for row in rows]
        if kind in ("", "_bytes"):
            self._count_checkpoints()
        # whatever was measured last
        self.rows[kind].sort(key=lambda row: REGIMES.index(row["regime"]))
        for changed in {kind, "_bytes"} if kind == "" else {kind}:
            if self.rows[changed]:
                measure.write_csv(self._folder / f"protections{changed}.csv", self.rows[changed])

    def _count_checkpoints(self) -> None:
        """Bytes that checkpoints write, as a step's share of one: the median over rounds.

        They come from the rounds, where tables are trained and checkpoints lie at their interval.
        Of incremental ones the last before a kill is seen; one in FULL_EVERY is as large as the
        largest of their regime.
        """
        written = [row for row in self.rows[""] if row.get("checkpoint_bytes")]
        largest: dict[str, int] = {}
        for row in written:
            largest[row["regime"]] = max(
                largest.get(row["regime"], 0), int(row["checkpoint_bytes"])
            )
        shares: dict[tuple[str, str], list[float]] = {}
        for row in written:
            size = int(row["checkpoint_bytes"])
            if CONTENDERS[row["contender"]].sets.get("checkpoint.kind") == "incremental":
                size += (largest[row["regime"]] - size) / FULL_EVERY
            shares.setdefault((row["regime"], row["contender"]), []).append(
                size / int(row["checkpoint_every_steps"])
            )
        for row in self.rows["_bytes"]:
            if found := shares.get((row["regime"], row["contender"])):
                row["written_bytes_per_step"] = round(statistics.median(found))

    def has(self, kind: str, regime: str, contender: str | None = None) -> bool:
        """Whether there are rows of a regime, or of a contender in it."""
        return any(
            row["regime"] == regime and contender in (None, row["contender"])
            for row in self.rows[kind]
        )

    def next_round(self, regimes: Sequence[str]) -> int:
        """The number of the first round after those that there are of `regimes`."""
        return max(
            (
                int(row["round"]) + 1
                for kind in ("", "_size")
                for row in self.rows[kind]
                if row["regime"] in regimes
            ),
            default=0,
        )

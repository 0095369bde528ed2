"""MODEL, no measurement: what protection would cost with larger tables and clusters.

    python benchmarks/overhead_model.py        # reads benchmarks/results/protections.csv
    python benchmarks/overhead_model.py --server-mtbf-hours 5000 --storage-gbit 25

Every line that it prints says model. Overheads are shares of the time that training alone takes, to
first order: every failure costs by itself, and nothing fails while a failure is being made good.
There are S servers with B bytes of rows and state each. Failures are independent and come every
M = (MTBF of a server) / S:

  checkpoint, every T seconds     normal C / T      failures (T / 2 + 2 C + D) / M
      C = B / storage rate: each server writes its part while training waits. Going back loses half
      an interval on average, reads each file twice, to check and to load it, and takes D to notice.
      T is 30 or 60 minutes, or sqrt(2 C M) (Young 1974), the best to first order: the least that
      waiting can cost.
  checkpoint-async                normal f C / T    failures (T / 2 + C + 2 C + D) / M
      Training loses a share f of C, to waiting and to slower steps. What it goes back to is older
      by the C that writing takes.
  erasure k=4 m=1                 normal p          failures (g + R (1 - w)) / M
      p: parity's cost per step, which does not grow with the tables. g: training time lost to a
      kill. R = B (1 + m/k) / rebuild rate: all rows of the lost shard, as if every one had been
      updated, and its parity. w: throughput while rebuilding, as a share.

Measured are the medians over the rounds of a regime, from the CSV: p, not below 0; f, the overhead
of asynchronous checkpoints over that of synchronous ones, not below 0; g; w, not above 1; D, the
recovery of erasure, which has nothing to load; and the rebuild rate. That is the bytes of a shard
and its parity over the seconds until all is rebuilt, at the rows per step of the benchmark
(contenders.REBUILD_ROWS). What the model says of the very runs that were measured is printed beside
what they took.

Assumed, as arguments, are the MTBF of a server (--server-mtbf-hours) and how fast it writes and
reads its part of a checkpoint (--storage-gbit). Left out are a second failure while the first is
made good, with m = 1, the loss of trainers, and failures of storage. Writes
benchmarks/results/protections_model.csv.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ecrm.launch.overhead import (
    ClusterModel,
    MeasuredInputs,
    best_interval,
    of_checkpoints,
    of_erasure,
)
from lib import measure
from lib.contenders import CONTENDERS, PAPER
from lib.ratios import Row
from lib.table_rows import TableError, read_rows
from lib.versus import OURS, overheads

GIGABYTE = 1e9
TABLE_GIGABYTES = (100, 200, 500, 1000, 2000)
SERVERS = (5, 20, 50, 100, 200, 500)
MINUTES = (30, 60)
SERVER_MTBF_HOURS = 10_000.0
FIELDS = (
    "what",
    "regime",
    "tables_gb",
    "servers",
    "server_mtbf_hours",
    "storage_gbit",
    "protection",
    "interval_minutes",
    "checkpoint_seconds",
    "normal_overhead",
    "failure_overhead",
    "overhead",
    "lost_seconds_per_failure",
    "slow_seconds_per_failure",
)


class NotMeasured(Exception):
    """A number that the model rests on is not in the CSV; one line."""


def measured_of(rows: Sequence[Row], regime: str) -> MeasuredInputs:
    """The model's inputs of one regime. Raises NotMeasured."""

    def median(contender: str, field: str) -> float:
        found = [
            float(row[field])
            for row in rows
            if (row["regime"], row["contender"]) == (regime, contender) and str(row[field]) != ""
        ]
        if not found:
            raise NotMeasured(
                f"{regime}: no {field} of {contender} in the CSV: run bench_protections.py with it"
            )
        return statistics.median(found)

    if not overheads(rows).get((regime, OURS)):
        raise NotMeasured(
            f"{regime}: no overhead of {OURS} in the CSV: run bench_protections.py with it"
        )
    extra = CONTENDERS[OURS].sets["protection.m"] / CONTENDERS[OURS].sets["protection.k"]
    lost_bytes = (
        median("checkpoint-30-sync", "checkpoint_bytes") / median(OURS, "servers") * (1 + extra)
    )
    return MeasuredInputs(
        parity_cost=max(0.0, statistics.median(overheads(rows)[regime, OURS])),
        async_share=max(
            0.0,
            median("checkpoint-30-async", "overhead") / median("checkpoint-30-sync", "overhead"),
        ),
        lost_seconds=median(OURS, "lost_ms") / 1000,
        kept=min(1.0, median(OURS, "kept_rebuilding")),
        notice_seconds=median(OURS, "recovery_ms") / 1000,
        rebuild_bytes_per_second=lost_bytes / median(OURS, "whole_after_s"),
        extra=extra,
    )


def model_rows(
    measured: Mapping[str, MeasuredInputs], mtbf_hours: float, storage_gbit: float
) -> list[dict[str, Any]]:
    """The model's CSV: every size of tables and cluster, every protection."""
    found = []
    for regime, inputs in measured.items():
        for gigabytes in TABLE_GIGABYTES:
            for servers in SERVERS:
                cluster = ClusterModel(
                    gigabytes * GIGABYTE, servers, 3600 * mtbf_hours, storage_gbit * 1e9 / 8
                )
                best = best_interval(cluster)
                cases = [("erasure k=4 m=1", 0.0, of_erasure(cluster, inputs))]
                for name, background in (("checkpoint", False), ("checkpoint-async", True)):
                    cases += [
                        (
                            name,
                            60.0 * minutes,
                            of_checkpoints(cluster, 60.0 * minutes, inputs, background),
                        )
                        for minutes in MINUTES
                    ]
                cases.append(
                    ("checkpoint at its best interval", best, of_checkpoints(cluster, best, inputs))
                )
                for name, interval, cost in cases:
                    found.append(
                        dict(
                            zip(
                                FIELDS,
                                (
                                    "model",
                                    regime,
                                    gigabytes,
                                    servers,
                                    f"{mtbf_hours:g}",
                                    f"{storage_gbit:g}",
                                    name,
                                    f"{interval / 60:.4g}" if interval else "",
                                    f"{cluster.checkpoint_seconds:.4g}" if interval else "",
                                    f"{cost.normal:.6g}",
                                    f"{cost.failures:.6g}",
                                    f"{cost.total:.6g}",
                                    f"{cost.lost:.6g}",
                                    f"{cost.slow:.6g}",
                                ),
                                strict=True,
                            )
                        )
                    )
    return found


def against(rows: Sequence[Row], regime: str, measured: MeasuredInputs) -> list[str]:
    """Lines for a reader: synchronous checkpoints in the model, beside what was measured."""
    lines = []
    for name in ("checkpoint-30-sync", "checkpoint-60-sync"):
        mine = [row for row in rows if (row["regime"], row["contender"]) == (regime, name)]
        if not mine:
            continue
        seconds = statistics.median(float(row["checkpoint_wait_ms"]) for row in mine) / 1e3
        step, every = (
            statistics.median(float(row[field]) for row in mine)
            for field in ("step_ms", "checkpoint_every_steps")
        )
        interval = every * step / 1e3
        lost = interval / 2 + seconds + measured.notice_seconds
        lines.append(
            f"model: {regime}, the runs of {name} themselves: a failure loses {lost:.2f} s, "
            f"measured {statistics.median(float(row['lost_ms']) for row in mine) / 1e3:.2f} s"
        )
    return lines


def said(rows: Sequence[Row]) -> list[str]:
    """Lines for a reader: 1 TB on 5 and 100 servers."""
    lines = []
    for row in rows:
        if (int(row["tables_gb"]), int(row["servers"])) in ((1000, 5), (1000, 100)):
            every = (
                f" every {float(row['interval_minutes']):.1f} min"
                if row["interval_minutes"]
                else ""
            )
            lines.append(
                f"model: {row['regime']}, {row['tables_gb']} GB on {row['servers']} servers, "
                f"{row['protection']}{every}: overhead "
                f"{float(row['overhead']):.2%} ({float(row['normal_overhead']):.2%} normal), "
                f"a failure loses {float(row['lost_seconds_per_failure']):,.1f} s"
            )
    return lines


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--server-mtbf-hours",
        type=float,
        default=SERVER_MTBF_HOURS,
        help="assumed; default %(default)s",
    )
    parser.add_argument(
        "--storage-gbit",
        type=float,
        default=PAPER.storage_gbit,
        help="assumed, per server; default %(default)s",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=measure.RESULTS,
        help="folder of the CSV files read and written",
    )
    options = parser.parse_args(words)
    for name in ("server_mtbf_hours", "storage_gbit"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name):g}: must be above 0")
    try:
        rows = read_rows(options.results / "protections.csv")
    except TableError as error:
        sys.exit(f"overhead_model: {error}")
    if rows is None:
        sys.exit(
            f"overhead_model: there is no {options.results / 'protections.csv'}: "
            "run bench_protections.py first"
        )
    measured, missing = {}, []
    for regime in dict.fromkeys(row["regime"] for row in rows):
        try:
            measured[regime] = measured_of(rows, regime)
        except NotMeasured as error:
            missing.append(str(error))
    if not measured:
        sys.exit(f"overhead_model: {missing[0]}")
    for line in missing:
        print(f"model: left out: {line}")
    for regime, inputs in measured.items():
        print(f"model: {regime}, measured inputs: {inputs}")
        print("\n".join(against(rows, regime, inputs)))
    found = model_rows(measured, options.server_mtbf_hours, options.storage_gbit)
    measure.write_csv(options.results / "protections_model.csv", found)
    print("\n".join(said(found)))


if __name__ == "__main__":
    main()

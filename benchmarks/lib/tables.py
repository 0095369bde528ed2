"""Writes the measured tables of README and docs from the committed CSV files.

They stand between `<!-- table: NAME -->` and `<!-- end -->`. A table whose CSV does not exist says
so instead of numbers. A new table is one entry of TABLES.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.accuracy import accuracy
from lib.protection_tables import (
    protections,
    protections_accuracy,
    protections_bars,
    protections_bytes,
    protections_model,
    protections_short,
    protections_size,
)
from lib.ratios import (
    SESSION_BARS,
    STEP_BARS,
    STEP_FORMER,
    Row,
    scaling_ratios,
    session_ratios,
    step_ratios,
)
from lib.table_rows import TableError, groups, markdown, numbers, read_rows, source, spread
from lib.versus import (
    BASELINES,
    OURS,
    by_round,
    overheads,
    redundancy,
)

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"^<!-- (?:table: (?P<name>.+?)|(?P<end>end)) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Table:
    """A table of a page: the CSV files of benchmarks/results it is made from, and what makes it.

    `lines` gets the rows of `csv`, and then those of each of the `others`. With `sourced` a line
    below the table says what `csv` was measured on.
    """

    csv: str
    lines: Callable[..., list[str]]
    others: tuple[str, ...] = ()
    sourced: bool = True


@dataclass(frozen=True)
class Picture:
    """A picture of a page: docs/figures/NAME.png, its text, and the CSV that figures.py draws."""

    csv: str
    name: str
    text: str


def recovery(rows: Sequence[Row]) -> list[str]:
    """What a kill costs, by scenario."""
    header = (
        "what is killed",
        "gap, ms",
        "of which recovery, ms",
        "one step, ms",
        "steps redone",
        "samples/s before the kill",
        "samples/s while rebuilding",
        "samples/s afterwards",
        "full redundancy restored after, s",
    )
    fields = (
        "gap_ms",
        "recovery_ms",
        "step_ms",
        "redone_steps",
        "samples_per_second_before",
        "samples_per_second_during",
        "samples_per_second_after",
    )
    return markdown(
        header,
        (
            [
                scenario,
                *(spread(numbers(mine, field)) for field in fields),
                spread(numbers(mine, "rebuild_seconds"), 2),
            ]
            for (scenario,), mine in groups(rows, "scenario").items()
        ),
    )


def rebuild_pace(rows: Sequence[Row]) -> list[str]:
    """Seconds per GB and pace kept while a lost shard is rebuilt, by servers and pace."""
    return markdown(
        (
            "servers",
            "k",
            "rows come back",
            "s per GB",
            "floor by bytes, s per GB",
            "pace kept while rebuilding",
            "step afterwards, ms",
        ),
        (
            (
                str(servers),
                str(k),
                str(pace),
                spread(numbers(mine, "seconds_per_gb"), 1),
                f"{statistics.median(numbers(mine, 'floor_seconds_per_gb')):.1f}",
                spread(numbers(mine, "kept"), 2),
                spread(numbers(mine, "step_ms"), 1),
            )
            for (servers, k, _, pace), mine in groups(
                rows, "servers", "k", "trainers", "pace"
            ).items()
        ),
    )


def endurance(rows: Sequence[Row]) -> list[str]:
    """Faults, the time between faults and the throughput kept, run by run."""
    header = (
        "ranks on hosts",
        "ranks killed",
        "links broken",
        "a fault every, s",
        "throughput kept while training",
        "with starts of pieces",
        "model",
    )
    return markdown(
        header,
        (
            (
                f"{row['ranks']} on {max(1, int(row['hosts']))}",
                f"{int(row['kills']):,}",
                f"{int(row['link_faults']):,}",
                f"{float(row['seconds_between_faults']):.1f}",
                f"{float(row['kept_while_training']):.1%}",
                f"{float(row['kept_with_starts']):.1%}",
                row["wrong"] or "equal to the bit, no leak",
            )
            for row in rows
        ),
    )


def loss_model(rows: Sequence[Row]) -> list[str]:
    """MODEL: rebuilding and data loss, by hosts, causes of failures and stripes."""
    return markdown(
        (
            "MODEL: hosts",
            "a host fails every, h",
            "k, m",
            "rebuild, 4,096 rows a step, min",
            "data loss after, years",
            "rebuild, 5 % of time, min",
            "data loss after, years",
        ),
        (
            (
                f"{int(row['hosts']):,}",
                f"{int(row['host_mtbf_hours']):,}",
                f"{row['k']}, {row['m']}",
                *(
                    cell
                    for when in ("before", "now")
                    for cell in (
                        f"{float(row[f'rebuild_seconds_{when}']) / 60:,.0f}",
                        _years(float(row[f"loss_years_{when}"])),
                    )
                ),
            )
            for row in rows
        ),
    )


def _years(years: float) -> str:
    """Years with two digits at least, or a bound."""
    if years > 1e6:
        return "over 1,000,000"
    return f"{years:,.0f}" if years >= 10 else f"{years:.2g}"


def scrub(rows: Sequence[Row]) -> list[str]:
    """What scrubbing costs, by the number of rows per shard and step; medians over the runs."""
    header = (
        "rows checked per shard and step",
        "step time / step time without scrubbing",
        "sent per server and step, MB",
        "steps until every row is checked",
    )
    lines = []
    for (count,), mine in groups(rows, "rows_per_step").items():
        on = int(count) > 0
        lines.append(
            (
                f"{int(count):,}",
                f"{statistics.median(numbers(mine, 'ratio_to_0')):.2f}",
                f"{float(mine[0]['bytes_per_server_and_step']) / 1e6:.2f}" if on else "-",
                f"{int(mine[0]['steps_a_pass']):,}" if on else "-",
            )
        )
    return markdown(header, lines)


def start(rows: Sequence[Row]) -> list[str]:
    """Seconds to the first step and memory of a rank, with and without the fork server."""
    header = (
        "ranks",
        "torch is imported",
        "first step after, s",
        "Pss of a rank, MB",
        "private to a rank, MB",
        "guards, mpirun, launcher, fork server, MB",
    )
    words = {"one import": "once a host", "own import": "by each rank"}
    lines = []
    mine = [row for row in rows if row["part"] == "start"]
    for (ranks, name), each in groups(mine, "ranks", "contender").items():
        memory = ("pss_bytes_of_a_rank", "private_bytes_of_a_rank", "beside_bytes")
        lines.append(
            (
                str(int(ranks)),
                words[name],
                spread(numbers(each, "first_step_seconds"), 1),
                *(f"{statistics.median(numbers(each, field)) / 1e6:,.1f}" for field in memory),
            )
        )
    return markdown(header, lines)


def server_memory(rows: Sequence[Row]) -> list[str]:
    """Where each byte of a server is: Pss by kind, in MB and per byte of rows."""
    mine = [row for row in rows if row["part"] == "memory"]

    def of(*fields: str) -> tuple[float, float]:
        signs = [(-1 if field[0] == "-" else 1, field.lstrip("-")) for field in fields]
        found = [
            (
                sum(sign * float(row[f"{field}_bytes"]) for sign, field in signs),
                float(row["ranks"]),
                float(row["data_bytes"]),
            )
            for row in mine
        ]
        return (
            statistics.median(count / servers for count, servers, _ in found),
            statistics.median(count / of_rows for count, _, of_rows in found),
        )

    parts = (
        ("rows with optimizer state", ("data",)),
        ("parity", ("parity",)),
        ("other anonymous memory", ("anonymous", "-data", "-parity")),
        ("memory shared for messages: rows looked up, gradients, deltas", ("shared",)),
        ("libraries", ("files",)),
        ("in all, by Pss", ("pss",)),
    )
    found = ((what, *of(*fields)) for what, fields in parts if mine)
    return markdown(
        ("of a server", "MB", "bytes per byte of rows"),
        ((what, f"{count / 1e6:,.1f}", f"{share:.2f}") for what, count, share in found),
    )


THOUSAND = {
    "messages": ("all messages of a slot, and its rows collected", "at most 1 ms"),
    "shard": ("all a shard does in a step for the slots of all ranks", "-"),
    "ledger": ("what survivors tell each other, and the joint state", "at most 1 MB a rank"),
    "plan": ("new hosts for the shards of a dead host", "at most 50 ms"),
    "digest": ("digest of rows", "at least 40 million rows/s"),
}
"""In words, with the target, by the case of bench_thousand.py."""


def thousand(rows: Sequence[Row]) -> list[str]:
    """What a rank of a thousand pays for the number of ranks; medians over the rounds."""
    lines = []
    for (case,), mine in groups(rows, "case").items():
        what, bar = THOUSAND[case]
        amount, taken = int(mine[0]["amount"]), numbers(mine, "cpu_ms")
        told = {
            "messages": f"{amount:,} rows",
            "shard": f"{amount:,} rows",
            "ledger": f"{amount / 1e6:.2f} MB sent by a rank",
            "plan": f"{amount} ranks dead",
            "digest": f"{amount / statistics.median(taken) / 1e3:,.1f} million rows/s",
        }[case]
        cold = f"{statistics.median(numbers(mine, 'cold_cpu_ms')):.2f}"
        lines.append((what, f"{int(mine[0]['ranks']):,}", spread(taken, 2), cold, told, bar))
    header = ("what", "ranks", "CPU time of a rank, ms", "with cold caches, ms", "amount", "target")
    return markdown(header, lines)


def wire(rows: Sequence[Row]) -> list[str]:
    """Bytes sent by a rank in a step, by placement, and the balance of whole tables."""
    header = (
        "tables",
        "placement",
        "wire",
        "steps of a commit",
        "sent by a rank in a step, MB",
        "rows or sums",
        "gradients",
        "parity",
        "requests",
        "busiest rank, MB",
        "rows and lookups of the fullest shard / even share",
    )
    lines = []
    for row in rows:
        of = {kind: float(row[f"mb {kind}"]) for kind in WIRE}
        lines.append(
            (
                row["tables"],
                row["placement"],
                row["wire_dtype"],
                str(row["commit_interval"]),
                f"{float(row['mb']):.1f}",
                f"{of['rows'] + of['sums of bags']:.1f}",
                f"{of['gradients of rows'] + of['gradients of bags']:.1f}",
                f"{of['parity deltas']:.1f}",
                f"{of['requests'] + of['lists of bags']:.1f}",
                f"{float(row['mb_of_busiest']):.1f}",
                f"{float(row['rows_of_fullest']):.2f}, {float(row['lookups_of_fullest']):.2f}",
            )
        )
    return markdown(header, lines)


def network(rows: Sequence[Row]) -> list[str]:
    """Steps on hosts with slow links, by contender; medians over the rounds."""
    header = ("ids a bag", "contender", "ms a step", "samples/s", "sent by a rank in a step, MB")
    lines = []
    for (ids, contender), mine in groups(rows, "ids_per_bag", "contender").items():
        sent = [row for row in mine if row["sent_mb"] != ""]
        lines.append(
            (
                str(ids),
                str(contender),
                f"{statistics.median(numbers(mine, 'step_ms')):,.0f}",
                f"{statistics.median(numbers(mine, 'samples_per_second')):,.0f}",
                f"{statistics.median(numbers(sent, 'sent_mb')):.1f}" if sent else "-",
            )
        )
    return markdown(header, lines)


WIRE = (
    *("rows", "sums of bags", "gradients of rows", "gradients of bags", "parity deltas"),
    *("requests", "lists of bags"),
)
"""Kinds of bytes in wire.csv."""


def prepare(rows: Sequence[Row]) -> list[str]:
    """Rows of Criteo text prepared a second, by the number of threads."""
    header = (
        "contender",
        "threads",
        "rows a second of CPU time, thousand",
        "CPU time / pyarrow alone",
        "rows a second by the clock, thousand",
        "on free cores, computed, thousand",
    )

    def thousands(row: Row, field: str) -> str:
        return f"{float(row[field]) / 1000:,.0f}"

    def with_spread(row: Row, field: str) -> str:
        low, high = (thousands(row, f"{field}_{part}") for part in ("p20", "p80"))
        return f"{thousands(row, field)} ({low} to {high})"

    return markdown(
        header,
        (
            (
                str(row["contender"]),
                str(row["threads"]),
                with_spread(row, "rows_per_cpu_second"),
                f"{float(row['cpu_over_floor']):.2f}",
                with_spread(row, "rows_per_second"),
                thousands(row, "rows_per_second_of_free_cores"),
            )
            for row in rows
        ),
    )


def gpu(rows: Sequence[Row]) -> list[str]:
    """Bandwidth of the kernels on a GPU, beside that of a copy and the time of a peer."""
    header = ("kernel", "dtype", "rows", "bytes a row", "ms", "GB/s", "of a copy", "FBGEMM, ms")
    fields = ("case", "dtype", "rows", "row_bytes", "median_ms", "gb_per_second", "of_copy")
    return markdown(
        header,
        (
            [*(row[field] for field in fields), row["peer_ms"] or "-"]
            for row in rows
            if row["part"] == "kernels"
        ),
    )


def gpu_steps(rows: Sequence[Row]) -> list[str]:
    """A step with rows on a GPU, protected and not, over the rounds."""
    header = ("protection", "step, ms", "over unprotected")
    steps = [row for row in rows if row["part"] == "step"]
    return markdown(
        header,
        (
            [
                name,
                spread(numbers(mine, "median_ms"), 1),
                spread(numbers(mine, "over_unprotected"), 3),
            ]
            for (name,), mine in groups(steps, "case").items()
        ),
    )


def checkpoint(rows: Sequence[Row]) -> list[str]:
    """What a checkpoint of one rank takes, by mode."""
    header = (
        "writer",
        "size, MB",
        "training waits, s",
        "durable after, s",
        "checksums verified in, s",
        "loaded in, s",
    )
    fields = ("stall_seconds", "seconds", "check_seconds", "load_seconds")
    return markdown(
        header,
        (
            [
                f"`{mode}`",
                f"{int(mine[0]['bytes']) / 1e6:,.0f}",
                *(
                    spread(numbers(mine, field), 2) if mine[0][field] != "" else "-"
                    for field in fields
                ),
            ]
            for (mode,), mine in groups(rows, "mode").items()
        ),
    )


def checkpoint_runs(rows: Sequence[Row]) -> list[str]:
    """What checkpoints every so often cost training, by regime and mode."""
    header = (
        "regime",
        "mode",
        "steps between checkpoints",
        "size, MB",
        "overhead, %",
        "mean overhead, %",
        "training waits, ms",
        "durable after, s",
        "disk alone, s",
    )
    lines = []
    for (regime, mode), mine in groups(rows, "regime", "mode").items():
        overheads = [100 * value for value in numbers(mine, "overhead")]
        size = statistics.median(numbers(mine, "bytes")) / 1e6
        lines.append(
            (
                regime,
                f"`{mode}`",
                str(mine[0]["every_steps"]),
                f"{size:,.0f}",
                spread(overheads, 1),
                f"{statistics.mean(overheads):.1f}",
                spread(numbers(mine, "stall_ms"), 0),
                spread(numbers(mine, "durable_seconds"), 2),
                f"{size / statistics.median(numbers(mine, 'disk_mb_per_second')):.2f}",
            )
        )
    return markdown(header, lines)


def kernels(rows: Sequence[Row]) -> list[str]:
    """Each kernel and what it is compared with: times, bytes a second, and our time over theirs."""
    header = (
        "operation",
        "rows of so many bytes",
        "implementation",
        "time, ms: median (p20 to p80)",
        "GB/s",
        "ECRM's time / its time: median (p20 to p80)",
    )
    return markdown(
        header,
        (
            (
                row["case"],
                f"{int(row['rows']):,} of {row['row_bytes']}",
                row["contender"],
                "{:.2f} ({:.2f} to {:.2f})".format(
                    *(float(row[field]) for field in ("median_ms", "p20_ms", "p80_ms"))
                ),
                f"{float(row['gb_per_second']):.1f}",
                "{:.2f} ({:.2f} to {:.2f})".format(
                    *(float(row[f"ours_over_this{which}"]) for which in ("", "_p20", "_p80"))
                ),
            )
            for row in rows
        ),
    )


def step(rows: Sequence[Row]) -> list[str]:
    """Milliseconds a step and samples per second of every contender, by regime."""
    return markdown(
        ("regime", "contender", "step, ms", "samples/s"),
        (
            (
                regime,
                contender,
                spread(numbers(mine, "step_ms"), 1),
                spread(numbers(mine, "samples_per_second")),
            )
            for (regime, contender), mine in sorted(groups(rows, "regime", "contender").items())
            if contender not in STEP_FORMER
        ),
    )


def step_phases(rows: Sequence[Row]) -> list[str]:
    """Milliseconds of each phase of a step, by regime and contender: means over the ranks.

    The time in the transport is shown too.
    """
    names = list(groups(rows, "contender"))
    found = {key: mine for key, (mine,) in groups(rows, "regime", "contender", "phase").items()}
    lines = []
    for regime, mine in groups(rows, "regime").items():
        for (phase,) in groups(mine, "phase"):
            each = [found.get((*regime, *name, phase)) for name in names]
            lines.append(
                (
                    *regime,
                    phase,
                    *(
                        f"{float(row['mean_ms']):.1f} ({float(row['in_transport_ms']):.1f})"
                        if row
                        else "-"
                        for row in each
                    ),
                )
            )
        sums = [
            [
                sum(numbers((row for row in mine if (row["contender"],) == name), field))
                for field in ("mean_ms", "in_transport_ms")
            ]
            for name in names
        ]
        lines.append(
            (*regime, "whole step", *(f"{took:.1f} ({waited:.1f})" for took, waited in sums))
        )
    return markdown(
        ("regime", "phase", *(f"{name}: ms (of which in transport)" for (name,) in names)), lines
    )


def step_bars(rows: Sequence[Row]) -> list[str]:
    """Samples per second of one contender over another's in the same round, and the bar."""
    found = [(*entry, step_ratios(rows, *entry[:3])) for entry in STEP_BARS]
    return markdown(
        ("regime", "samples/s of", "divided by those of", "ratio: median (range)", "at least"),
        (
            (regime, one, other, spread(values, 3), f"{bar:.2f}")
            for regime, one, other, bar, values in found
            if values
        ),
    )


def session(rows: Sequence[Row]) -> list[str]:
    """Milliseconds a step and samples per second of a session and of what took turns with it."""
    lines = []
    for (regime, bag, session, _, contender), mine in groups(
        rows, "regime", "ids_per_bag", "session", "beside", "contender"
    ).items():
        ratio = numbers(mine, "session_over_this")
        lines.append(
            (
                regime,
                bag,
                contender,
                spread(numbers(mine, "step_ms"), 1),
                spread(numbers(mine, "samples_per_second")),
                "" if contender == session else spread(ratio, 3),
            )
        )
    return markdown(
        (
            "regime",
            "ids per bag",
            "contender",
            "step, ms",
            "samples/s",
            "session's samples/s / its",
        ),
        lines,
    )


def session_bars(rows: Sequence[Row]) -> list[str]:
    """Samples per second of a session over another's in turns beside its own, and the bar."""
    lines = []
    for regime, ids_per_bag, session, other, bar in SESSION_BARS:
        if ratios := session_ratios(rows, regime, ids_per_bag, session, other):
            lows, medians, highs = zip(*ratios, strict=True)
            between = f"{statistics.median(medians):.2f} ({min(lows):.2f} to {max(highs):.2f})"
            lines.append((regime, str(ids_per_bag), session, other, between, f"{bar:.2f}"))
    return markdown(
        (
            "regime",
            "ids per bag",
            "samples/s of",
            "divided by those of",
            "ratio: median (p20 to p80)",
            "at least",
        ),
        lines,
    )


def scaling(rows: Sequence[Row]) -> list[str]:
    """Milliseconds a step at each point, and the ratio to the same series' first point.

    Ratios are of the same round.
    """
    lines = []
    for (series, value), mine in groups(rows, "series", "value").items():
        if series != "rebuild":
            ratios = scaling_ratios(rows, series)[int(value)]
            different = [float(row["rows_per_step"]) for row in mine if row.get("rows_per_step")]
            lines.append(
                (
                    "rows per table" if series == "tables" else series,
                    f"{int(value):,}",
                    spread(numbers(mine, "step_ms"), 1),
                    spread(ratios, 2),
                    f"{max(different):,.0f}" if different else "",
                )
            )
    return markdown(
        (
            "what grows",
            "value",
            "step, ms",
            "ratio to the first of its series",
            "distinct rows per step",
        ),
        lines,
    )


def rebuilding(rows: Sequence[Row]) -> list[str]:
    """What the kill of a server costs a run of the scaling benchmark."""
    killed = [row for row in rows if row["series"] == "rebuild"]
    steps = [
        (float(row["gap_ms"]) - float(row["noticing_ms"])) / float(row["step_ms"]) for row in killed
    ]
    return markdown(
        (
            "step, ms",
            "gap, ms",
            "of which detection, ms",
            "of which recovery, ms",
            "gap without detection, in steps",
            "samples/s while rebuilding / samples/s before",
        ),
        [
            (
                *(
                    spread(numbers(killed, field))
                    for field in ("step_ms", "gap_ms", "noticing_ms", "recovery_ms")
                ),
                spread(steps, 1),
                spread(numbers(killed, "kept_while_rebuilding"), 2),
            )
        ]
        if killed
        else [],
    )


def dense(rows: Sequence[Row]) -> list[str]:
    """A session's dense part compiled and in bfloat16, beside float32, with the gap of a kill."""
    header = (
        "session",
        "dense part",
        "step, ms",
        "CPU of a slot, ms",
        "samples/s / float32's: median (p20 to p80)",
        "loss of ten steps",
        "gap of a kill, ms",
    )
    lines = []
    for (session, manner), mine in groups(rows, "session", "manner").items():
        low, middle, high = (
            statistics.median(numbers(mine, f"over_float32{which}"))
            for which in ("_p20", "", "_p80")
        )
        lines.append(
            (
                session,
                manner,
                spread(numbers(mine, "step_ms"), 1),
                spread(numbers(mine, "cpu_ms"), 1),
                "" if manner == "float32" else f"{middle:.2f} ({low:.2f} to {high:.2f})",
                spread(numbers(mine, "logloss"), 4),
                spread(numbers(mine, "gap_ms")),
            )
        )
    return markdown(header, lines)


def oversubscribed(rows: Sequence[Row]) -> list[str]:
    """Milliseconds a step of ranks that outnumber the cores, compared with binding.

    The comparison is with the same ranks each bound to one core, in interleaved runs. The choice of
    `auto` is marked.
    """
    manners = [manner for (manner,) in groups(rows, "manner")]
    lines = []
    for (layout, servers, trainers), mine in groups(rows, "layout", "servers", "trainers").items():
        found = {
            manner: numbers(each, "over_bind_in_turns")
            for (manner,), each in groups(mine, "manner").items()
        }
        ranks = (
            f"{servers} ranks"
            if layout == "colocated"
            else f"{servers} servers, {trainers} trainers"
        )
        bound = [row for row in mine if row["manner"] == "bind"]
        lines.append(
            (
                layout,
                ranks,
                str(bound[0]["cores"]),
                spread(numbers(bound, "step_ms"), 1),
                *(
                    spread(found[manner], 2) + (" (auto)" if manner == mine[0]["auto"] else "")
                    for manner in manners
                ),
            )
        )
    return markdown(
        (
            "layout",
            "ranks",
            "cores",
            "step with bind, ms",
            *(f"{manner} / bind" for manner in manners),
        ),
        lines,
    )


def headline(
    steps: Sequence[Row], kept: Sequence[Row], gaps: Sequence[Row], beside: Sequence[Row]
) -> list[str]:
    """The five numbers of the README: where rows dominate a step, and then where MLPs do.

    Rows of step.csv, protections.csv, recovery.csv and checkpoint_runs.csv. What checkpoints add to
    steps is of the last one: those of protections.csv went through the page cache.
    """
    regime, ours, theirs = "embedding-heavy", OURS, BASELINES[0]
    rates = {
        name: statistics.median(numbers(mine, "samples_per_second"))
        for (at, name), mine in groups(steps, "regime", "contender").items()
        if at == regime
    }
    torchrec = max(rate for name, rate in rates.items() if name.startswith("torchrec-"))
    faster, dense_faster = (
        statistics.median(step_ratios(steps, at, "erasure", "torchrec"))
        for at in (regime, "dense-heavy")
    )
    lost, cost = by_round(kept, "lost_ms"), overheads(kept)
    stalls = {name: statistics.median(lost[regime, name].values()) / 1e3 for name in (ours, theirs)}
    parity, dense_parity = (
        100 * statistics.median(cost[at, ours]) for at in (regime, "dense-heavy")
    )
    larger = 100 / statistics.median(step_ratios(steps, regime, "erasure", "none")) - 100
    checkpoints = groups(beside, "regime", "mode")
    written, dense_written = (
        statistics.median(100 * cost for cost in numbers(checkpoints[at, "sync"], "overhead"))
        for at in (regime, "dense-heavy")
    )
    held = {
        name: statistics.median(
            redundancy(row) for row in kept if (row["regime"], row["contender"]) == (regime, name)
        )
        for name in (ours, "chain-2")
    }
    killed = next(iter(groups(gaps, "scenario").values()))
    gap, step = (statistics.median(numbers(killed, field)) for field in ("gap_ms", "step_ms"))
    return markdown(
        ("", "ECRM with parity", "compared with"),
        (
            (
                "training speed",
                f"{rates['erasure']:,.0f} samples/s",
                f"TorchRec's fastest plan, unprotected: {torchrec:,.0f} "
                f"({faster:.1f} times; {dense_faster:.1f} where MLPs dominate)",
            ),
            (
                "progress lost to a SIGKILL",
                f"{stalls[ours]:.2f} s",
                f"checkpoints: {stalls[theirs]:.2f} s ({stalls[theirs] / stalls[ours]:.0f} times)",
            ),
            (
                "extra memory, bytes per byte of rows",
                f"{held[ours]:.2f}",
                f"one replica: {held['chain-2']:.2f}",
            ),
            (
                "steps slowed by protection, without failures",
                f"{parity:.1f} % slower; {larger:.1f} % with the tables of the first line; "
                f"{dense_parity:.1f} % where MLPs dominate",
                f"checkpoints: {written:.1f} %, {'less' if written < parity else 'more'} than "
                f"parity; {dense_written:.1f} % where MLPs dominate, "
                f"{'less' if dense_written < dense_parity else 'more'} than parity",
            ),
            (
                "quickstart: a server dies",
                f"{gap:.0f} ms between two steps",
                f"without a death: {step:.0f} ms",
            ),
        ),
    )


def picture(name: str, text: str, csv: str = "") -> Picture:
    """docs/figures/NAME.png, drawn from `csv`, or else from NAME.csv."""
    return Picture(csv or f"{name}.csv", name, text)


TABLES: dict[str, Table | Picture] = {
    "accuracy": Table("accuracy.csv", accuracy),
    "gpu": Table("gpu.csv", gpu),
    "gpu_steps": Table("gpu.csv", gpu_steps),
    "headline": Table(
        "step.csv",
        headline,
        ("protections.csv", "recovery.csv", "checkpoint_runs.csv"),
        sourced=False,
    ),
    "recovery": Table("recovery.csv", recovery),
    "rebuild pace": Table("rebuild_pace.csv", rebuild_pace),
    "endurance": Table("endurance.csv", endurance),
    "loss model": Table("loss_model.csv", loss_model),
    "prepare": Table("prepare.csv", prepare),
    "scrub": Table("scrub.csv", scrub),
    "thousand": Table("thousand.csv", thousand),
    "wire": Table("wire.csv", wire),
    "start": Table("start.csv", start),
    "server memory": Table("start.csv", server_memory),
    "network": Table("network.csv", network),
    "checkpoint": Table("checkpoint.csv", checkpoint),
    "checkpoint runs": Table("checkpoint_runs.csv", checkpoint_runs),
    "kernels": Table("kernels.csv", kernels),
    "step": Table("step.csv", step),
    "step bars": Table("step.csv", step_bars),
    "session": Table("session.csv", session),
    "session bars": Table("session.csv", session_bars),
    "step phases": Table("step_phases.csv", step_phases),
    "dense": Table("dense.csv", dense),
    "oversubscribed": Table("oversubscribed.csv", oversubscribed),
    "scaling": Table("scaling.csv", scaling),
    "rebuilding": Table("scaling.csv", rebuilding),
    "recovery figure": picture(
        "recovery", "Gap around a SIGKILL and throughput around it, by what is killed"
    ),
    "scrub figure": picture("scrub", "A step with rows scrubbed, as a ratio to a step without"),
    "checkpoint figure": picture(
        "checkpoint", "Seconds of writing, checking and loading a checkpoint, by mode"
    ),
    "checkpoint runs figure": picture(
        "checkpoint_runs", "Overhead of checkpoints while training, by mode and regime"
    ),
    "kernels figure": picture("kernels", "Time of each kernel over that of its peers and floors"),
    "step figure": picture(
        "step", "Samples per second with and without protection and of TorchRec, and their ratios"
    ),
    "scaling figure": picture("scaling", "A step as tables, servers, k and m grow"),
    "protections": Table("protections.csv", protections),
    "protections bars": Table("protections.csv", protections_bars),
    "protections short": Table("protections.csv", protections_short),
    "protections size": Table("protections_size.csv", protections_size),
    "protections accuracy": Table("protections_accuracy.csv", protections_accuracy),
    "protections bytes": Table("protections_bytes.csv", protections_bytes),
    "protections model": Table("protections_model.csv", protections_model),
    "protections figure": picture("protections", "Overhead by protection and regime"),
    "protections lost progress figure": picture(
        "protections_lost_progress",
        "Lost progress after a SIGKILL, by protection and regime",
        "protections.csv",
    ),
    "protections recovering figure": picture(
        "protections_recovering",
        "Training speed while recovering, by protection and regime",
        "protections.csv",
    ),
    "protections copies figure": picture(
        "protections_copies", "Effect of k and of the number of copies", "protections.csv"
    ),
    "protections rebuild figure": picture(
        "protections_rebuild", "Effect of the rows rebuilt per step", "protections.csv"
    ),
    "protections timeline figure": picture(
        "protections_timeline", "Throughput before, during and after a kill"
    ),
    "protections accuracy figure": picture(
        "protections_accuracy", "AUC along runs in which a server is killed"
    ),
    "protections size figure": picture("protections_size", "Overhead by the size of the tables"),
    "protections model figure": picture(
        "protections_model", "MODEL: overhead by the size of the tables"
    ),
}
"""By the name in `<!-- table: NAME -->`."""


def content(
    name: str,
    results: Path,
    figures: str = "figures",
    tables: Mapping[str, Table | Picture] = TABLES,
) -> str:
    """What belongs between the marks of that table, on a page from which `figures` leads to them.

    Raises TableError.
    """
    found = tables.get(name)
    if found is None:
        raise TableError(f"there is no table {name}: only {', '.join(tables)}")
    others = () if isinstance(found, Picture) else found.others
    rows = {file: read_rows(results / file) for file in (found.csv, *others)}
    if missing := [file for file, there in rows.items() if there is None]:
        return f"Not measured yet: there is no benchmarks/results/{missing[0]}."
    if isinstance(found, Picture):
        return f"![{found.text}]({figures}/{found.name}.png)"
    try:
        lines = found.lines(*rows.values())
        if found.sourced:
            told = f"*{source(rows[found.csv], found.csv)}*"
            lines += ["", *textwrap.wrap(told, 100, break_on_hyphens=False)]
        return "\n".join(lines)
    except (KeyError, ValueError, TypeError) as error:
        raise TableError(
            f"{results / found.csv} does not give the table {name}: {type(error).__name__} {error}"
        ) from None


def rewritten(
    text: str,
    results: Path,
    figures: str = "figures",
    tables: Mapping[str, Table | Picture] = TABLES,
) -> tuple[str, list[str]]:
    """(the document with every table as its CSV gives it, names of the tables that differed).

    `figures` leads from the document to docs/figures. Raises TableError.
    """
    parts, differing, done, opened = [], [], 0, None
    for mark in MARK.finditer(text):
        line = text.count("\n", 0, mark.start()) + 1
        if (opened is None) == (mark["end"] is not None):
            raise TableError(
                f"line {line}: {mark[0]} "
                + ("ends no table" if opened is None else f"within the table {opened['name']}")
            )
        if mark["name"] is not None:
            opened = mark
            continue
        wanted = f"\n\n{content(opened['name'], results, figures, tables)}\n\n"
        if text[opened.end() : mark.start()] != wanted:
            differing.append(opened["name"])
        parts += [text[done : opened.end()], wanted]
        done, opened = mark.start(), None
    if opened is not None:
        raise TableError(f"the table {opened['name']} has no <!-- end -->")
    return "".join(parts) + text[done:], differing


def documents(root: Path) -> list[Path]:
    """README.md and every page in docs/."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite or check all documents; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a table differs from its CSV"
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=ROOT,
        help="folder with README.md, docs/ and benchmarks/results/",
    )
    options = parser.parse_args(arguments)
    found, at = {}, options.root
    try:
        for at in documents(options.root):
            figures = os.path.relpath(options.root / "docs" / "figures", at.parent)
            new, differing = rewritten(
                at.read_text(), options.root / "benchmarks" / "results", figures
            )
            found[at] = (new, differing)
    except (TableError, OSError) as error:
        print(f"{at.relative_to(options.root)}: {error}", file=sys.stderr)
        return 2
    for path, (new, differing) in found.items():
        for name in differing:
            print(
                f"{path.relative_to(options.root)}: table {name} "
                f"{'differs from its CSV' if options.check else 'written'}"
            )
        if differing and not options.check:
            path.write_text(new)
    if options.check and any(differing for _, differing in found.values()):
        print("type python benchmarks/publish.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The cells of a drill's two tables, and both as plain text. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ecrm.base.wording import counted
from ecrm.drill.report import Report
from ecrm.drill.run_record import FailureRecord, RunRecord

TEXT_WIDTH = 118

NO_FAILURE = "no failure was survived"

FAILURE_COLUMNS = (
    ("ranks", ""),
    ("step", ""),
    ("at", "s"),
    ("phase", ""),
    ("noticed", "ms"),
    ("recovery", "ms"),
    ("gap", "ms"),
    ("redone", "steps"),
    ("on demand", "rows"),
    ("rebuild", "s"),
    ("lost", "bytes"),
)
"""(name, unit) of each column of the table of failures."""

FAILURE_LEGEND = (
    "at: killed so many seconds after the start; step, phase: where survivors noticed; "
    "noticed: from the kill; recovery: from noticing until the survivors train again; "
    "gap: between the steps finished before and after; "
    "rebuild: from noticing until every lost row was back; "
    "lost: bytes of the lost shards; rows without an update are counted, and not rebuilt"
)


def pace_columns(report: Report) -> tuple[tuple[str, str], ...]:
    """(name, unit) of each column of the table of throughput."""
    return ("throughput", ""), ("useful", report.unit), ("ratio", ""), ("steps", ""), ("time", "s")


PACE_NAMES = {
    "undisturbed": "undisturbed run",
    "before": "disturbed run, before the first failure",
    "during": "  from a failure until rebuilt",
    "after": "  after, whole again",
    "disturbed": "  all of it",
}


def pace_legend(report: Report) -> str:
    """The rule of counting; a script's evaluations count, since their end is unknown."""
    left_out = " is" if report.global_batch is None else " and evaluations are"
    return (
        "useful: a step counts once, also when it was redone; "
        f"the first step (warm-up){left_out} left out"
    )


def failure_cells(run: RunRecord) -> list[list[str]]:
    """One row per failure of a run, in order of time."""
    return [_failure_row(run, failure) for failure in run.failures]


def _failure_row(run: RunRecord, failure: FailureRecord) -> list[str]:
    at, noticed = run.since_start(failure.began_at), None
    if failure.noticed_at is not None and failure.killed_at is not None:
        noticed = failure.noticed_at - failure.killed_at
    lost = bool(failure.shards)
    rebuilt = failure.rebuild_seconds is not None
    return [
        ", ".join(map(str, failure.ranks)),
        str(failure.step),
        "?" if at is None else f"{at:.2f}",
        failure.phase,
        "?" if noticed is None else _milliseconds(noticed),
        _milliseconds(failure.recovery_seconds),
        "none" if failure.stall_seconds is None else _milliseconds(failure.stall_seconds),
        str(failure.redone_steps),
        "-"
        if not lost
        else f"{failure.on_demand_rows:,}"
        if failure.on_demand_rows is not None
        else "?",
        "-" if not lost else f"{failure.rebuild_seconds:.2f}" if rebuilt else "never",
        "-" if not lost else f"{failure.lost_bytes:,}" if failure.lost_bytes is not None else "?",
    ]


def pace_cells(report: Report) -> list[list[str]]:
    """One row per part of the runs."""
    rows = []
    for name, title in PACE_NAMES.items():
        found, ratio = report.paces[name], report.ratio(name)
        rate, digits = report.rate(name), 0 if report.global_batch is not None else 1
        rows.append(
            [
                title,
                "-" if rate is None else f"{rate:,.{digits}f}",
                "-" if ratio is None else f"{ratio:.2f}",
                str(found.steps),
                f"{found.seconds:.2f}",
            ]
        )
    return rows


def hash_line(report: Report) -> str:
    """Whether the finished models are the same."""
    first, second = report.hashes
    if report.equal:
        return f"model_sha256 equal: {first}"
    if not report.exact:
        name = report.disturbed.summary["protection"]["name"]
        return (
            f"model_sha256 not equal, by nature of {name}: undisturbed {first}, disturbed {second}"
        )
    return (
        f"model_sha256 NOT EQUAL: undisturbed {first or 'unknown'}, disturbed {second or 'unknown'}"
    )


def accuracy_line(report: Report) -> str | None:
    """Measures of both runs, and the differences of the disturbed run.

    `None` if the models are equal, or ought to be.
    """
    if report.exact or report.equal:
        return None
    parts = []
    for title, name in (("evaluation auc", "eval_auc"), ("log loss", "eval_logloss")):
        first, second, off = (
            report.undisturbed.summary.get(name),
            report.disturbed.summary.get(name),
            report.difference(name),
        )
        parts.append(
            f"{title} - "
            if off is None
            else f"{title} {first:.4f} undisturbed, {second:.4f} disturbed ({off:+.4f})"
        )
    return "; ".join(parts)


def headline(report: Report) -> str:
    """The drill in one line: the kills, and whether the run survived."""
    killed, failures = len(report.disturbed.kills), len(report.disturbed.failures)
    start = f"drill of {report.name}: {counted(killed, 'rank')} killed"
    if not report.disturbed.completed:
        return f"{start}, the disturbed run did not complete"
    same = (
        "the same model to the bit"
        if report.equal
        else "but NOT the same model"
        if report.exact
        else "not the same model, by nature"
    )
    return f"{start}, {counted(failures, 'failure')} survived, {same}"


def as_text(report: Report) -> str:
    """All text printed by a drill at its end, without a last newline."""
    failures = failure_cells(report.disturbed)
    blocks = [headline(report)]
    if failures:
        blocks += [_grid(FAILURE_COLUMNS, failures, left=(0, 3)), _legend(FAILURE_LEGEND)]
    else:
        blocks.append(NO_FAILURE)
    blocks += [
        _grid(pace_columns(report), pace_cells(report), left=(0,)),
        _legend(pace_legend(report)),
    ]
    blocks += [
        textwrap.fill(f"note: {note}", TEXT_WIDTH, subsequent_indent="  ") for note in report.notes
    ]
    blocks += filter(None, (hash_line(report), accuracy_line(report)))
    return "\n".join(blocks)


def _legend(text: str) -> str:
    return textwrap.fill(text, TEXT_WIDTH, initial_indent="  ", subsequent_indent="  ")


def _grid(
    columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], left: Sequence[int]
) -> str:
    """Columns as wide as needed, numbers to the right; `left` are the columns of words."""
    head = [[f"{name} {unit}".strip() for name, unit in columns]]
    widths = [max(len(row[i]) for row in [*head, *rows]) for i in range(len(columns))]
    lines = []
    for row in [*head, *rows]:
        cells = [
            cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])
            for i, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}"

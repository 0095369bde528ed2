"""A drill as one self-contained HTML page. Pure: a report in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ecrm.drill import html
from ecrm.drill.charts import throughput
from ecrm.drill.report import Report
from ecrm.drill.table import (
    FAILURE_COLUMNS,
    FAILURE_LEGEND,
    NO_FAILURE,
    accuracy_line,
    failure_cells,
    hash_line,
    headline,
    pace_cells,
    pace_columns,
    pace_legend,
)


def page(report: Report, facts: Mapping[str, str], config: str) -> str:
    """The page, as HTML text.

    `facts` are versions and the like, by name. `config` is TOML text.
    """
    return html.page(
        headline(report),
        [
            _verdict(report),
            html.with_key(throughput(report.line, report.unit)),
            "<h2>Failures</h2>",
            _failures(report),
            "<h2>Throughput</h2>",
            html.table(pace_columns(report), pace_cells(report), words=(0,)),
            html.legend(pace_legend(report)),
            *_notes(report),
            "<h2>What ran</h2>",
            html.facts(facts),
            html.folded("The config of both runs", config),
        ],
    )


def _verdict(report: Report) -> str:
    if report.problems:
        reasons = "<br>".join(escape(problem) for problem in report.problems)
        return (
            f'<p class="verdict bad"><strong>Failed.</strong> {reasons}<br>'
            f"{escape(hash_line(report))}</p>"
        )
    lines = filter(None, (hash_line(report), accuracy_line(report)))
    return f'<p class="verdict"><strong>Passed.</strong> {"<br>".join(map(escape, lines))}</p>'


def _failures(report: Report) -> str:
    rows = failure_cells(report.disturbed)
    if not rows:
        return f"<p>{escape(NO_FAILURE)}</p>"
    return html.table(FAILURE_COLUMNS, rows, words=(0, 3)) + html.legend(FAILURE_LEGEND)


def _notes(report: Report) -> list[str]:
    if not report.notes:
        return []
    return [
        "<h2>Notes</h2>",
        "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in report.notes) + "</ul>",
    ]

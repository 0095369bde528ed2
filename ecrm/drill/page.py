"""A drill as one self-contained HTML page. Pure: text and pictures in, text out."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

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

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1f2328; --dim: #59636e; --line: #d8dee4; --good: #1a7f37; --bad: #cf222e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #161b22; --ink: #e6edf3; --dim: #9198a1; --line: #30363d; --good: #3fb950;
    --bad: #ff7b72;
  }
}
body {
  background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 76rem; margin: 0 auto; padding: 1.5rem;
}
h1 { font-size: 1.45rem; margin: 0 0 .5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.verdict {
  border-left: 5px solid var(--good); padding: .35rem .8rem; margin: 0 0 1.25rem;
  overflow-wrap: anywhere;
}
.verdict.bad { border-color: var(--bad); } .verdict strong { color: var(--good); }
.verdict.bad strong { color: var(--bad); }
img { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td {
  padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap;
}
th { font-weight: 600; vertical-align: bottom; }
th small { display: block; font-weight: 400; color: var(--dim); }
.word { text-align: left; white-space: pre; }
.legend, dt { color: var(--dim); font-size: .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
dd { margin: 0; overflow-wrap: anywhere; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .7rem; font-size: .85rem; }
"""


def page(report: Report, facts: Mapping[str, str], config: str, light: bytes, dark: bytes) -> str:
    """The page, as HTML text.

    `facts` are versions and the like, by name. `config` is TOML text. `light` and `dark` are the
    picture as PNG.
    """
    title = escape(headline(report))
    parts = [
        f"<h1>{title}</h1>",
        _verdict(report),
        f'<picture><source srcset="{_data_uri(dark)}" media="(prefers-color-scheme: dark)">'
        f'<img src="{_data_uri(light)}" '
        'alt="Throughput of both runs over time, kills, and how much was rebuilt"></picture>',
        "<h2>Failures</h2>",
        _failures(report),
        "<h2>Throughput</h2>",
        _table(pace_columns(report), pace_cells(report), words=(0,)),
        _legend(pace_legend(report)),
        *_notes(report),
        "<h2>What ran</h2>",
        "<dl>"
        + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
        + "</dl>",
        f"<details><summary>The config of both runs</summary><pre>{escape(config)}</pre></details>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
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
    rows = failure_cells(report)
    if not rows:
        return f"<p>{escape(NO_FAILURE)}</p>"
    return _table(FAILURE_COLUMNS, rows, words=(0, 3)) + _legend(FAILURE_LEGEND)


def _notes(report: Report) -> list[str]:
    if not report.notes:
        return []
    return [
        "<h2>Notes</h2>",
        "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in report.notes) + "</ul>",
    ]


def _table(
    columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], words: Sequence[int]
) -> str:
    def cell(tag: str, number: int, inner: str) -> str:
        return (
            f'<{tag} class="word">{inner}</{tag}>' if number in words else f"<{tag}>{inner}</{tag}>"
        )

    head = "".join(
        cell("th", i, escape(name) + f"<small>{escape(unit) or '&nbsp;'}</small>")
        for i, (name, unit) in enumerate(columns)
    )
    body = "\n".join(
        "<tr>" + "".join(cell("td", i, escape(text)) for i, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _legend(text: str) -> str:
    return f'<p class="legend">{escape(text)}</p>'


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()

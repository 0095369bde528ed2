"""The frame of a page: one self-contained HTML file, its style and its tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ecrm.drill.svg import COLOURS, Chart, drawn, key, names

STYLE = (
    COLOURS
    + """
body {
  background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 76rem; margin: 0 auto; padding: 1.25rem;
}
h1 { font-size: 1.45rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.verdict {
  border-left: 5px solid var(--good); padding: .35rem .8rem; margin: 0 0 1.25rem;
  overflow-wrap: anywhere;
}
.verdict.bad { border-color: var(--bad); } .verdict strong { color: var(--good); }
.verdict.bad strong { color: var(--bad); }
.key { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: 0; }
.key li { font-size: .85rem; } .key i {
  display: inline-block; width: 1rem; height: .6rem; margin-right: .4rem; border-radius: 2px;
}
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: 1rem; }
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
@media (max-width: 60rem) {
  thead { display: none; } table, tbody { display: block; }
  tr {
    display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr));
    border-bottom: 1px solid var(--line); padding: .4rem 0;
  }
  td { display: block; text-align: left; border: 0; padding: .1rem 0; }
  td.word { white-space: pre-wrap; } td.word:first-child { grid-column: 1 / -1; }
  td::before { content: attr(data-name); color: var(--dim); font-size: .8rem; display: block; }
}
"""
)

Column = tuple[str, str]
"""Name and unit of a column; the unit is "" without a unit."""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page of HTML; `title` is text, `parts` are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def with_key(chart: Chart) -> str:
    """A chart with its legend below."""
    return drawn(chart) + key(names(chart))


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], words: Sequence[int]) -> str:
    """A table of HTML; `words` are the columns with words, set to the left.

    On a narrow page every row is a card, with the names of columns above the cells.
    """

    def cell(tag: str, number: int, inner: str, more: str = "") -> str:
        word = ' class="word"' if number in words else ""
        return f"<{tag}{word}{more}>{inner}</{tag}>"

    head = "".join(
        cell("th", i, escape(name) + f"<small>{escape(unit) or '&nbsp;'}</small>")
        for i, (name, unit) in enumerate(columns)
    )
    named = [escape(f"{name} {unit}".strip()) for name, unit in columns]
    body = "\n".join(
        "<tr>"
        + "".join(
            cell("td", i, escape(text), f' data-name="{named[i]}"') for i, text in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def legend(text: str) -> str:
    """A paragraph below a table."""
    return f'<p class="legend">{escape(text)}</p>'


def facts(known: Mapping[str, str]) -> str:
    """Facts by name, as a list of HTML."""
    entries = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in known.items())
    return "<dl>" + "".join(entries) + "</dl>"


def folded(summary: str, text: str) -> str:
    """Preformatted text, folded away under a line."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"

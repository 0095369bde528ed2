"""The pages of docs/how-to: the script of each page, and the lines that the page shows."""

from __future__ import annotations

import re
from pathlib import Path

from support.paths import ROOT

SHOWN = "<!-- script: examples/how_to/"
PAGES = sorted(
    page for page in (ROOT / "docs" / "how-to").glob("*.md") if SHOWN in page.read_text()
)


def script_of(page: Path) -> Path:
    """The script that a page shows."""
    (name,) = re.findall(r"^<!-- script: (\S+) -->$", page.read_text(), re.MULTILINE)
    return ROOT / name


def printed_on(page: Path) -> list[str]:
    """The lines that the script prints by the page."""
    below = page.read_text().partition("<!-- end of script -->")[2]
    (block,) = re.findall(r"^```\n(.*?)^```$", below, re.DOTALL | re.MULTILINE)
    return block.splitlines()


def missing(shown: list[str], output: str) -> list[str]:
    """The lines shown from the first that does not follow in the output, in order."""
    lines = iter(output.splitlines())
    return next((shown[place:] for place, line in enumerate(shown) if line not in lines), [])

"""A page of the tutorial, walked: its commands typed in order, and the lines that the page shows.

Numbers that no two runs share are compared by their unit: times, rates, memory of the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

MEASURED = [
    (r"(?<= )/\S*/(runs/|\.venv/)", r"\1"),
    (r"\b(\w+)-\d{8}-\d{6}\b", r"\1-WHEN"),
    (r"\b[\d,.]+ (steps/s|samples/s|s|ms|GiB memory|rows on demand|MB are available)\b", r"# \1"),
    (r"\b(kernels|versions) \w+", r"\1 #"),
    (r"survives \d+ more failures?  rebuilt \d+%", "survives # rebuilt #"),
    (r"^\s*(\d+) +(\d+) +[\d.]+ +(\w+) .*", r"rank \1 in step \2, \3"),
    (r"^( *(?:undisturbed run|disturbed run, |from a |after, |all of it)\D*) [\d,. ]+$", r"\1 #"),
    (r"(of their own|\d+ to \d+ MB).*", r"\1"),
    (r"0\.\d\d (times as fast)", r"# \1"),
    (r"\s+", " "),
]
"""Patterns and what stands in their place, in this order."""
NOT_COMPARED = re.compile(
    r"^(\.\.\.|machine |torch |kernels |note: |mpi |mpirun |waiting until |  \S)"
)
"""Gaps, the machine of `ecrm doctor`, the line of mpirun, notes and waits of a noisy machine."""


@dataclass(frozen=True)
class Block:
    """A block of a page: words to type ("sh"), or text of a fence by its language ("" for output).

    `before` is the paragraph above.
    """

    kind: str
    text: str
    before: str


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    found, paragraph, lines = [], "", page.read_text().splitlines()
    while lines:
        line = lines.pop(0)
        if line.startswith("```"):
            end = lines.index("```")
            found.append(Block(line[3:], "\n".join(lines[:end]), paragraph))
            del lines[: end + 1]
        elif line.startswith("    ") and not paragraph.startswith("- "):
            taken = [line]
            while lines and lines[0].startswith("    "):
                taken.append(lines.pop(0))
            found.append(Block("sh", "\n".join(each[4:] for each in taken), paragraph))
        elif line.strip():
            paragraph = line
    return found


def masked(line: str, loosely: bool = False) -> str:
    """A printed line without what is measured.

    `loosely`: without numbers but hashes, and without the phase of a death.
    """
    for pattern, instead in MEASURED:
        line = re.sub(pattern, instead, line)
    if loosely and not line.startswith("model_"):
        line = re.sub(r"\(\w+\); back", "(#); back", re.sub(r"[\d,.]*\d", "#", line))
    return line.strip()


def not_printed(shown: str, output: str, loosely: bool = False) -> list[str]:
    """The lines of a page that a run has not printed."""
    there = {masked(line, loosely) for line in output.splitlines()}
    wanted = [line for line in shown.splitlines() if line and not NOT_COMPARED.match(line)]
    return [line for line in wanted if masked(line, loosely) not in there]


TUTORIALS = sorted((ROOT / "docs" / "tutorial").glob("*.md"))

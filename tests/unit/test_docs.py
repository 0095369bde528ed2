"""What the documents name is there."""

from __future__ import annotations

import re
import runpy

import pytest

from support.paths import ROOT

PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "kernels").rglob("README.md"),
        ROOT / "datasets" / "README.md",
    ]
)
TESTS = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
FUNCTIONS = {
    name
    for text in TESTS.values()
    for name in re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE)
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_and_file_that_a_page_names_exists(page):
    text = page.read_text()
    named = set(re.findall(r"`(?:tests/\w+/test_\w+\.py::)?(test_\w+)(?:\[[^`]*\])?`", text))
    assert named <= FUNCTIONS | {path.stem for path in TESTS}, named - FUNCTIONS
    for path in re.findall(
        r"`((?:ecrm|tests|kernels|benchmarks|configs)/[\w./]+\.(?:py|cpp|h|md|toml))`", text
    ):
        assert (ROOT / path).exists(), path


def test_each_guarantee_has_a_line_in_the_table_of_tests():
    text = (ROOT / "docs" / "guarantees.md").read_text()
    said, held = text.split("\n## Tests\n")
    tests = dict(re.findall(r"^\| ([PE]\d+) \| (.+) \|$", held, re.MULTILINE))
    numbers = re.findall(r"^\| ([PE]\d+) \|", said, re.MULTILINE)
    assert len(numbers) > 80
    assert numbers == list(tests)
    for number, words in tests.items():
        assert re.search(r"`test_\w+`|`tests/\w+/test_\w+\.py`|not tested", words), number


def test_the_diagrams_are_those_that_the_program_draws():
    program = runpy.run_path(str(ROOT / "docs" / "figures" / "diagrams.py"))
    assert program["main"](["--check"]) == 0

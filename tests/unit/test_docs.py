"""What the documents name is there."""

from __future__ import annotations

import re
import subprocess
import sys

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


def test_the_guarantees_name_a_test_or_say_that_there_is_none():
    text = (ROOT / "docs" / "guarantees.md").read_text()
    lines = [
        line
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith(("| promise |", "| event |"))
    ]
    assert len(lines) > 50
    silent = [
        line
        for line in lines
        if not re.search(r"`test_\w+|`tests/\w+/test_\w+|not tested|`ecrm/simulate/", line)
    ]
    assert silent == []


def test_the_diagrams_are_those_that_the_program_draws():
    done = subprocess.run([sys.executable, ROOT / "docs" / "figures" / "diagrams.py", "--check"])
    assert done.returncode == 0

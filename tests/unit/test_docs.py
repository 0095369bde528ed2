"""What the documents name is there."""

from __future__ import annotations

import difflib
import re
import runpy

import pytest

import ecrm
from ecrm.base import errors
from ecrm.config.schema import SECTIONS
from ecrm.engine.events import EVENTS
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


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ +(.+)$", without_code(page), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-") for text in texts}


def without_code(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    text, wrong = page.read_text(), []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            wrong.append(link)
    assert wrong == []


def test_the_runbook_says_what_to_do_at_every_event_and_exit_code():
    first_cells = re.findall(
        r"^\| ([^|]+) \|", (ROOT / "docs/operations/runbook.md").read_text(), re.MULTILINE
    )
    codes = {str(kind.exit_code) for kind in vars(errors).values() if hasattr(kind, "exit_code")}
    assert len(codes) >= 7
    assert codes <= set(first_cells)
    assert set(EVENTS) <= {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_at_most_100_columns_but_for_tables_links_and_samples(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    prose = (line for line in text.splitlines() if not line.startswith(("|", "    ", "*")))
    assert [line for line in prose if len(line) > 100 and "](" not in line] == []


def test_the_tutorial_shows_how_its_two_scripts_differ():
    page = (ROOT / "docs" / "tutorial" / "your-model.md").read_text()
    (shown,) = re.findall(r"^```diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    names = ["examples/multi_hot_dcn_plain.py", "examples/multi_hot_dcn.py"]
    scripts = [(ROOT / name).read_text().splitlines(keepends=True) for name in names]
    assert shown == "".join(difflib.unified_diff(*scripts, *names))
    assert all(f"`{name}`" in page for name in names)


def unknown_names(text: str) -> set[str]:
    """Names of sessions, of the package, of config keys and of options that ECRM lacks."""
    api = (ROOT / "docs" / "reference" / "api.md").read_text()
    commands = (ROOT / "docs" / "reference" / "cli.md").read_text()
    wrong = {f"ecrm.{n}" for n in re.findall(r"\becrm\.([A-Z]\w+)", text) if n not in ecrm.__all__}
    for name in re.findall(r"\bsession\.(\w+)", text):
        if f"##### Session.{name}\n" not in api:
            wrong.add(f"session.{name}")
    for section, key in re.findall(r"--set (\w+)\.(\w+)", text):
        if key not in SECTIONS.get(section, type).__dataclass_fields__:
            wrong.add(f"{section}.{key}")
    for line in re.findall(r"ecrm launch[^`\n]*", text):
        options = re.findall(r"(?<= )--[a-z-]+", line.partition(" -- ")[0])
        wrong |= {option for option in options if not re.search(f"`{option}[ `]", commands)}
    return wrong


@pytest.mark.parametrize("page", ["coming-from.md", "tutorial/your-model.md"])
def test_a_page_of_code_names_nothing_that_is_missing(page):
    assert unknown_names((ROOT / "docs" / page).read_text()) == set()


def test_missing_names_are_found():
    text = "session.sav() ecrm.Sesion `--set checkpoint.often=1` `ecrm launch x.py --resum auto`"
    assert unknown_names(text) == {"session.sav", "ecrm.Sesion", "checkpoint.often", "--resum"}

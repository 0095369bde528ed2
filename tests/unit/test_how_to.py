"""Each page of docs/how-to has a script, and the script prints the lines of the page."""

import runpy
from collections.abc import Iterator

import pytest
import torch

from support.how_to import PAGES, missing, printed_on, script_of
from support.paths import ROOT


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    """A lone rank sets torch up as it trains with it."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_script_prints_the_lines_of_its_page(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script_of(page)), run_name="__main__")
    output = capsys.readouterr().out
    assert printed_on(page) and missing(printed_on(page), output) == [], output


def test_every_script_has_a_page():
    scripts = sorted((ROOT / "examples" / "how_to").glob("*.py"))
    assert sorted(script_of(page) for page in PAGES) == scripts and len(scripts) == 7


def test_lines_in_another_order_are_missed():
    assert missing(["a", "b"], "x\na\nx\nb\n") == []
    assert missing(["b", "a"], "x\na\nx\nb\n") == ["a"]

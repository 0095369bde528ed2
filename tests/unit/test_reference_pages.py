"""docs/reference/ matches the code; a page that differs is shown as a diff with the remedy."""

import importlib.util
from types import ModuleType

import pytest

from support.paths import ROOT


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_pages_are_what_the_code_says(generate):
    found = generate.differences()
    assert found == [], "\n".join([*found, f"type {generate.COMMAND} and commit docs/reference"])


def test_a_page_that_is_not_the_code_s_is_told_and_mended(generate, tmp_path, capsys):
    assert generate.main(["--root", str(tmp_path)]) == 0
    assert generate.main(["--check", "--root", str(tmp_path)]) == 0
    folder = tmp_path / generate.FOLDER
    page = folder / "config.md"
    page.write_text(page.read_text().replace("Default `50`.", "Default `60`."))
    (folder / "old.md").write_text("# Of an earlier version\n")
    (folder / "cli.md").unlink()
    capsys.readouterr()
    assert generate.main(["--check", "--root", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "-Default `60`. At least 0.\n+Default `50`. At least 0.\n" in said
    assert "-# Of an earlier version" in said and "+# Commands" in said
    assert "type make docs" in said
    assert generate.main(["--root", str(tmp_path)]) == 0
    assert generate.main(["--check", "--root", str(tmp_path)]) == 0


def test_lines_are_at_most_100_columns_but_for_tables_and_links(generate):
    long = [
        line
        for make in generate.PAGES.values()
        for line in make().splitlines()
        if len(line) > generate.COLUMNS and not line.startswith(("|", "    ")) and "](" not in line
    ]
    assert long == []


def test_lists_attributes_and_open_arguments_of_the_code_are_on_the_page(generate):
    page = generate.api_page()
    assert "\n- `batch_size`: samples of a batch" in page
    assert "gather(**tensors: Tensor) -> None" in page
    assert "##### Session.gathered\n\nThe tensors gathered by the last loop over" in page


def test_scripts_one_after_another_keep_the_text_between(generate):
    name = "examples/how_to/schedule.py"
    marks = f"<!-- script: {name} -->\n<!-- end of script -->"
    shown = generate.with_scripts(f"{marks}\nbetween\n{marks}\n")
    assert shown.count("```python") == 2 and "-->\nbetween\n<!--" in shown
    assert generate.with_scripts(shown) == shown

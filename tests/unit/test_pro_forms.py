"""Sentences name their nouns: the share of pro-forms in docstrings, comments and pages.

A pro-form is a word that stands for a noun, such as `what`, `those` or `it`. Text in backticks, in
code blocks, tables and headings is not counted. Every room of `ecrm/` and every page has a limit,
since a total of the whole project would hide a bad room or page.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from support.paths import ROOT

PRO_FORMS = frozenset(
    [
        "what",
        "which",
        "whose",
        "whoever",
        "whatever",
        "whichever",
        "it",
        "its",
        "they",
        "them",
        "their",
        "those",
        "these",
        "that",
        "this",
        "one",
        "ones",
        "other",
        "others",
        "such",
        "there",
        "here",
        "where",
        "so",
        "each",
        "both",
        "none",
        "nobody",
        "another",
    ]
)
# most pro-forms in percent of the words, and most "what" in 1,000 words
README = (5.0, 2.0)
ROOM = (7.0, 2.0)
PAGE = (9.0, 3.0)
ALL_PAGES = (7.0, 2.0)

ROOMS = {
    path.stem: sorted(path.resolve().rglob("*.py")) or [path]
    for path in sorted((ROOT / "ecrm").iterdir())
    if path.suffix == ".py" or (path / "__init__.py").exists()
}
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "kernels").rglob("*.md")),
    )
    if "reference" not in path.parts
}


def of_python(path: Path) -> str:
    """The docstrings and comments of a file, docstrings below constants included."""
    source = path.read_text()
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    values = [node.value.value for node in statements if isinstance(node.value, ast.Constant)]
    found = [value for value in values if isinstance(value, str)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found += [token.string[1:] for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join(found)


def of_page(path: Path) -> str:
    """The sentences of a page."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    apart = ("    ", "|", "#", "<!--", "![", ">")
    lines = [line for line in text.splitlines() if not line.startswith(apart)]
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(lines))


def measure(found: list[str]) -> tuple[float, float]:
    """Pro-forms in percent, and "what" in 1,000 words."""
    text = re.sub(r"`[^`]*`", "X", "\n".join(found)).lower()
    words = re.findall(r"[a-z][a-z']*", text)
    return (
        100 * sum(word in PRO_FORMS for word in words) / len(words),
        1000 * words.count("what") / len(words),
    )


def check(texts: list[str], limits: tuple[float, float]) -> None:
    share, what = measure(texts)
    assert share <= limits[0], f"{share:.1f} % of the words are pro-forms: name the things"
    assert what <= limits[1], f'"what" comes {what:.1f} times in 1,000 words: name the things'


@pytest.mark.parametrize("room", ROOMS)
def test_the_docstrings_of_a_room_name_their_nouns(room):
    check([of_python(path) for path in ROOMS[room]], ROOM)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_its_nouns(page):
    check([of_page(PAGES[page])], PAGE)


def test_all_pages_together_name_their_nouns():
    check([of_page(path) for path in PAGES.values()], ALL_PAGES)


def test_the_readme_names_its_nouns():
    check([of_page(ROOT / "README.md")], README)


def test_a_text_over_a_limit_is_refused():
    with pytest.raises(AssertionError, match=r"40\.0 % of the words"):
        check(["What it says of `what`."], PAGE)
    with pytest.raises(AssertionError, match=r'"what" comes 100\.0 times'):
        check(["What stands once in a sentence of just ten words?"], (50.0, PAGE[1]))


def test_every_room_and_page_is_measured():
    """The code beside `ecrm/` is a room, too."""
    assert {"kernels", "testing", "engine", "nn"} <= set(ROOMS)
    assert len(ROOMS["kernels"]) > 20
    assert "docs/internals/transport.md" in PAGES


def test_the_measure_counts_pro_forms():
    assert measure(["What it says of `what`."]) == (40.0, 200.0)

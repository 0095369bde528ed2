"""Sentences name their nouns: the share of pro-forms in docstrings, comments and pages.

A pro-form is a word that stands for a noun, such as `what`, `those` or `it`. Text in backticks, in
code blocks, tables and headings is not counted.
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
LIMITS = {
    # of the words in percent, and of "what" in 1,000 words; to reach with docstrings: 7 and 2
    "README": (5.0, 2.0),
    "docstrings and comments": (7.0, 2.0),
    "pages": (7.0, 2.0),
}


def of_python(path: Path) -> str:
    """The docstrings and comments of a file."""
    source = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found += [token.string[1:] for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join(found)


def of_page(path: Path) -> str:
    """The sentences of a page."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    apart = ("    ", "|", "#", "<!--", "![", ">")
    lines = [line for line in text.splitlines() if not line.startswith(apart)]
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(lines))


def texts(part: str) -> list[str]:
    if part == "README":
        return [of_page(ROOT / "README.md")]
    if part == "pages":
        pages = (path for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.parts)
        return [of_page(path) for path in (*pages, ROOT / "CONTRIBUTING.md")]
    folders = (ROOT / "ecrm", ROOT / "kernels")
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    return [of_python(path) for path in sorted(files)]


def measure(found: list[str]) -> tuple[float, float]:
    """Pro-forms in percent, and "what" in 1,000 words."""
    text = re.sub(r"`[^`]*`", "X", "\n".join(found)).lower()
    words = re.findall(r"[a-z][a-z']*", text)
    return (
        100 * sum(word in PRO_FORMS for word in words) / len(words),
        1000 * words.count("what") / len(words),
    )


@pytest.mark.parametrize("part", LIMITS)
def test_sentences_name_their_nouns(part):
    most, most_what = LIMITS[part]
    share, what = measure(texts(part))
    assert share <= most, f"{share:.1f} % of the words are pro-forms: name the things"
    assert what <= most_what, f'"what" comes {what:.1f} times in 1,000 words: name the things'


def test_the_measure_counts_pro_forms():
    assert measure(["What it says of `what`."]) == (40.0, 200.0)

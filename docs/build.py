"""Builds the site of README and docs into build/site, and checks every link and anchor.

    python docs/build.py                # needs the packages of `ecrm[docs]`
    python docs/build.py --output DIR

The navigation is the table of docs/README.md: a row for a part, with the pages in their order.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = "docs/README.md"


def without_code(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def links(text: str) -> Iterator[str]:
    """The paths that a page links to, without anchors; pages of other sites are left out."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        path = link.partition("#")[0]
        if path and "://" not in path:
            yield path


def navigation(root: Path = ROOT) -> list[dict[str, list[dict[str, str]]]]:
    """The parts of the site, each with its pages: {part: [{title: path from the root}]}."""
    parts: list[dict[str, list[dict[str, str]]]] = []
    for line in (root / LIST).read_text().splitlines():
        if row := re.match(r"\| \*\*(.+?)\*\* \|", line):
            pages = re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", line)
            inside = [{title: from_root(root, LIST, path)} for title, path in pages]
            parts.append({row[1]: inside})
    return parts


def from_root(root: Path, page: str, link: str) -> str:
    """The path from the root that a page's link leads to."""
    return str((root / page).parent.joinpath(link).resolve().relative_to(root.resolve()))


def stage(root: Path, folder: Path) -> None:
    """Copy README, all pages of docs, and every file that a page links to, under the same paths.

    Raises IsADirectoryError for a link to a folder: a site has no page of a folder.
    """
    waiting = ["README.md", *(str(p.relative_to(root)) for p in (root / "docs").rglob("*.md"))]
    while waiting:
        path = waiting.pop()
        if (folder / path).exists() or not (root / path).exists():
            continue  # the build names a link that leads to no file
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, folder / path)
        if path.endswith(".md"):
            waiting += [from_root(root, path, link) for link in links((root / path).read_text())]


def build(root: Path, output: Path) -> None:
    """Build the site of a checkout; raises mkdocs.exceptions.Abort for a wrong link or anchor."""
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config

    pages = output.with_name(f"{output.name}-pages")
    shutil.rmtree(pages, ignore_errors=True)
    stage(root, pages)
    config = load_config(
        str(root / "docs" / "mkdocs.yml"),
        docs_dir=str(pages),
        site_dir=str(output),
        nav=navigation(root),
        strict=True,
    )
    build_site(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Build the site; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    args = parser.parse_args(argv)
    try:
        from mkdocs.exceptions import Abort
    except ImportError:
        print(
            "the site is built by mkdocs-material: type pip install -e '.[docs]'", file=sys.stderr
        )
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        build(args.root, args.output.resolve())
    except Abort as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{args.output}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())

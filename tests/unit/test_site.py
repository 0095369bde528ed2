"""The built site: all pages are in its navigation, and a wrong link or anchor stops the build."""

import importlib.util
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from support.paths import ROOT

PROGRAM = ROOT / "docs" / "build.py"
SMALL = {
    "README.md": "# Small\n\n[list](docs/README.md), [a script](run.py)\n",
    "run.py": "print(1)\n",
    "docs/mkdocs.yml": (ROOT / "docs/mkdocs.yml").read_text(),
    "docs/README.md": "# All\n\n| **Go** | [S](../README.md), [A](README.md), [P](page.md) |\n",
    "docs/page.md": "# A page's `data.path`\n\n[top](#a-pages-datapath)\n",
}


def build(root: Path, output: Path) -> subprocess.CompletedProcess:
    if importlib.util.find_spec("material") is None:
        pytest.skip("no mkdocs-material: pip install -e '.[docs]'")
    words = [sys.executable, str(PROGRAM), "--root", str(root), "--output", str(output)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_navigation_has_every_page_once():
    parts = runpy.run_path(str(PROGRAM))["navigation"]()
    assert [name for part in parts for name in part][:2] == ["Start", "Tutorials"]
    named = Counter(
        p for part in parts for pages in part.values() for e in pages for p in e.values()
    )
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    outside = {"README.md", "CONTRIBUTING.md", "datasets/README.md", "kernels/README.md"}
    assert dict(named) == dict.fromkeys(pages | outside, 1)


def test_the_site_builds_without_a_warning(tmp_path):
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert 'href="docs/tutorial/first-run/"' in (tmp_path / "site/index.html").read_text()
    assert (tmp_path / "site/docs/figures/server-dies.png").exists()


def test_a_small_site_has_the_files_that_its_pages_link_to(tmp_path):
    done = build(write(tmp_path / "root", SMALL), tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "run.py").read_text() == "print(1)\n"
    assert 'id="a-pages-datapath"' in (tmp_path / "site/docs/page/index.html").read_text()


def test_wrong_links_and_anchors_and_a_page_without_a_place_are_named(tmp_path):
    wrong = {
        "docs/page.md": "# Page\n\n[a](gone.md) [b](README.md#nothing)\n",
        "docs/unlisted.md": "# Unlisted\n",
    }
    done = build(write(tmp_path / "root", SMALL | wrong), tmp_path / "site")
    assert done.returncode == 1
    for named in ("gone.md", "#nothing", "unlisted.md"):
        assert named in done.stderr
    assert "Aborted with 3 warnings in strict mode" in done.stderr


def test_without_the_tool_a_line_says_how_to_install_it(tmp_path):
    (tmp_path / "mkdocs.py").write_text("raise ImportError\n")
    code = f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['build.py']; "
    done = subprocess.run(
        [sys.executable, "-c", code + f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == "the site is built by mkdocs-material: type pip install -e '.[docs]'\n"

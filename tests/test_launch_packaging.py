"""What `pip install .` takes along is what there is: every package, the configs and the C++ sources."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_is_listed():
    found = set()
    for package, folder in SETUPTOOLS["package-dir"].items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inside = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([package, *inside]))
    listed = SETUPTOOLS["packages"]
    assert sorted(found) == listed, "correct the list in pyproject.toml"


def test_files_that_are_not_python_are_taken_along():
    for package, patterns in SETUPTOOLS["package-data"].items():
        folder = ROOT / SETUPTOOLS["package-dir"][package]
        taken = {file for pattern in patterns for file in folder.glob(pattern)}
        there = {f for f in folder.rglob("*") if f.suffix in (".toml", ".cpp", ".h")}
        assert there and there <= taken

"""What `pip install .` takes along is what there is: every package, the configs and the C++ sources. And how `make` begins."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from support.paths import ROOT

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


@pytest.mark.drill
def test_the_wheel_works_away_from_the_checkout(tmp_path):
    source, wheels, installed = (tmp_path / name for name in ("source", "wheels", "installed"))
    built = shutil.ignore_patterns("*.so", "__pycache__")
    for folder in SETUPTOOLS["package-dir"].values():
        shutil.copytree(ROOT / folder, source / folder, ignore=built)
    for file in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / file, source)
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--wheel-dir",
        str(wheels),
        str(source),
    ]
    if _has("setuptools", 77) and _has("wheel", 0):
        words.append("--no-build-isolation")
    done = subprocess.run(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    shutil.rmtree(source)

    options = {
        "cwd": tmp_path,
        "env": {**os.environ, "PYTHONPATH": str(installed)},
        "capture_output": True,
        "text": True,
        "timeout": 120,
    }
    done = subprocess.run(
        [sys.executable, "-m", "ecrm", "config", "quickstart", "--set", "train.seed=99"], **options
    )
    assert done.returncode == 0 and "seed = 99" in done.stdout, done.stderr
    program = f"""
import json, importlib.util
from ecrm.config import shipped_configs
from ecrm.kernels.native import LIBRARY, instruction_set
instruction_set()
found = [importlib.util.find_spec(name).origin for name in {SETUPTOOLS["packages"]!r}]
print(json.dumps([*found, str(LIBRARY), *map(str, shipped_configs().values())]))
"""
    done = subprocess.run([sys.executable, "-c", program], **options)
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout)
    assert (
        len(files) > len(SETUPTOOLS["packages"]) + 1
        and [file for file in files if not Path(file).is_relative_to(installed)] == []
    )


def _has(package: str, least: int) -> bool:
    """Whether a package of at least that major version is installed."""
    try:
        return int(importlib.metadata.version(package).partition(".")[0]) >= least
    except importlib.metadata.PackageNotFoundError:
        return False


def make_venv(folder: Path, python: str) -> subprocess.CompletedProcess:
    """`make venv` in that folder with a shell script for Python."""
    script = folder / "python3"
    script.write_text(f"#!/bin/sh\n{python}\n")
    script.chmod(0o755)
    words = ["make", "--no-print-directory", "venv", f"VENV={folder / 'venv'}", f"PYTHON={script}"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60
    )


def test_make_names_the_package_that_ensurepip_is_in(tmp_path):
    done = make_venv(tmp_path, 'case "$*" in *ensurepip*) exit 1;; esac')
    assert done.returncode == 2 and not (tmp_path / "venv").exists()
    assert (
        done.stderr.splitlines()[0]
        == f"{tmp_path / 'python3'} has no ensurepip, which makes .venv: type apt install python3-venv"
    )


def test_make_begins_again_where_an_environment_was_left_without_pip(tmp_path):
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    done = make_venv(tmp_path, 'case "$*" in "-m venv"*) echo "making $*"; exit 1;; esac')
    assert f"making -m venv --clear {tmp_path / 'venv'}" in done.stdout, done.stderr

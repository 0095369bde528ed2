"""What `pip install .` installs: every package, the configs and the C++ sources.

Also: the first steps of `make`.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import ecrm
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
        there = {
            f
            for f in folder.rglob("*")
            if f.suffix in (".toml", ".cpp", ".h") or f.name == "py.typed"
        }
        assert there and there <= taken


def test_a_library_newer_than_its_sources_is_taken_and_an_older_one_compiled_anew(tmp_path):
    kernels, built = tmp_path / "kernels", tmp_path / "built/ecrm/kernels/_native.so"
    kernels.mkdir()
    shutil.copy(ROOT / "setup.py", tmp_path)
    (kernels / "native.cpp").write_text("int compiled() { return 1; }\n")
    (kernels / "_native.so").write_text("of an editable install")
    words = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", "built", "--force"]
    for seconds, taken in ((60, True), (-60, False)):
        now = (kernels / "native.cpp").stat().st_mtime
        os.utime(kernels / "_native.so", (now + seconds, now + seconds))
        os.utime(tmp_path / "setup.py", (now, now))
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=60)
        assert (built.read_bytes() == b"of an editable install") == taken


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
        == f"{tmp_path / 'python3'} has no ensurepip, which makes .venv: type apt install "
        f"python3-venv"
    )


def test_make_begins_again_where_an_environment_was_left_without_pip(tmp_path):
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    done = make_venv(tmp_path, 'case "$*" in "-m venv"*) echo "making $*"; exit 1;; esac')
    assert f"making -m venv --clear {tmp_path / 'venv'}" in done.stdout, done.stderr


def test_every_file_gives_the_same_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None and project == ecrm.__version__ == cited[1]
    assert f"## {project} (" in (ROOT / "CHANGELOG.md").read_text()

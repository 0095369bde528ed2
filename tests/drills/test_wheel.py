"""The wheel of this project works away from its checkout."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from support.paths import ROOT

SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


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

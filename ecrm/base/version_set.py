"""The set of versions for which equal bits are promised. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path

import ecrm
from ecrm.kernels import native

PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy")
"""The packages whose arithmetic decides the bits of a model."""

PACKAGE = Path(ecrm.__file__).parent
SOURCES = (".py", ".cpp", ".h")
"""Suffixes of source files."""


def version_set() -> dict[str, str]:
    """The version of every installed package in PACKAGES, and `cpu`, the machine's kind of CPU.

    The kind of CPU is the best instruction set of the kernels that the machine can run: torch
    chooses its own arithmetic alike.
    """
    found = {"cpu": native.supported_instruction_sets()[-1]}  # the fastest comes last
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def ecrm_build(package: Path = PACKAGE) -> str:
    """The version of ecrm and eight hexadecimal digits of its sources, such as "0.2.0+1a2b3c4d".

    The sources are all Python and C++ files in the folder `package`. An edited installation has
    another build. The library compiled from the C++ files is not read.
    """
    digest = hashlib.sha256()
    for folder, below, files in os.walk(package, followlinks=True):  # `kernels` may be a link
        below.sort()
        for name in sorted(file for file in files if file.endswith(SOURCES)):
            path = Path(folder, name)
            digest.update(f"{path.relative_to(package)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return f"{ecrm.__version__}+{digest.hexdigest()[:8]}"


def name_of(versions: Mapping[str, str]) -> str:
    """The name of a set of versions: eight hexadecimal digits of its SHA-256."""
    return hashlib.sha256(json.dumps(dict(versions), sort_keys=True).encode()).hexdigest()[:8]


def differing(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The differences of two sets, such as "torch 2.12.0 -> 2.13.0, cpu avx2 -> gfni"."""
    return ", ".join(
        f"{part} {before.get(part, 'none')} -> {now.get(part, 'none')}"
        for part in {**before, **now}
        if before.get(part) != now.get(part)
    )

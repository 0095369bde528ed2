"""The set of versions for which equal bits are promised. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping

from ecrm.kernels import native

PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy")
"""The packages whose arithmetic decides the bits of a model."""


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

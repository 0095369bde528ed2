"""TorchRec and FBGEMM, the packages of a session that a plain `pip install` cannot choose."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata

from ecrm.base.errors import UsageError

TORCHREC = "pip install --no-deps 'torchrec>=1.7,<2'"
"""The command that installs TorchRec.

TorchRec's metadata demands the CUDA build of FBGEMM, which unpacks into the folder of the CPU
build. So `--no-deps`; the metadata of ECRM names the packages that TorchRec imports.
"""
MINORS_APART = 5
"""FBGEMM 1.N is built for torch 2.(N + 5), and loads with no other torch."""


def require_torchrec() -> None:
    """Raise UsageError unless TorchRec is installed, and FBGEMM fits the installed torch.

    Imports neither of the packages.
    """
    if importlib.util.find_spec("torchrec") is None:
        raise UsageError("TorchRec is not installed", otherwise=f"type {TORCHREC}")
    fbgemm, torch = _version("fbgemm-gpu-cpu"), _version("torch")
    wanted = fbgemm_of(torch)
    if wanted and fbgemm and not fbgemm.startswith(f"{wanted}."):
        raise UsageError(
            f"fbgemm-gpu-cpu {fbgemm} cannot load with torch {torch}",
            otherwise=f"type pip install 'fbgemm-gpu-cpu=={wanted}.*'",
        )


def fbgemm_of(torch: str) -> str:
    """The release of FBGEMM built for a version of torch; "" for a development version.

    So "1.8" for torch 2.13.0+cpu.
    """
    match = re.fullmatch(r"2\.(\d+)\.\d+(\+.*)?", torch)
    return f"1.{int(match[1]) - MINORS_APART}" if match else ""


def _version(package: str) -> str:
    """The installed version of a package; "" without the package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""

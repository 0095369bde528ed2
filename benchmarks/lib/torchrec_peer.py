"""How benchmarks start the peer, benchmarks/peer_torchrec.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib import measure

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""The first four do what `ecrm.process.memory` and storage.prefault do in ECRM's ranks."""


def peer_words(
    name: str, sets: Mapping[str, Any], result: Path, options: Sequence[str] = ()
) -> list[str]:
    """The words that start it, with a process per server of the config.

    `name` is torchrec-PLAN, followed by -pipelined, -bound or both.
    """
    _, sharding, *manners = name.split("-")
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(sets["cluster.servers"]),
        str(Path(__file__).parents[1] / "peer_torchrec.py"),
        "quickstart",
        str(result),
        "--sharding",
        sharding,
        *(f"--{manner}" for manner in manners),
        *options,
        *measure.set_words(sets),
    ]

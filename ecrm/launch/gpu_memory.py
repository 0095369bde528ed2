"""The memory free on this machine's GPUs."""

from __future__ import annotations

import json
import subprocess
import sys

from ecrm.config.schema import Config

SECONDS = 60
"""Seconds without an answer before the free memory of the GPUs counts as unknown."""
PROGRAM = """
import json, torch
gpus = range(torch.cuda.device_count())
print(json.dumps([torch.cuda.mem_get_info(gpu)[0] for gpu in gpus]))
"""


def free_on_gpus(config: Config) -> list[int]:
    """Bytes free on each GPU usable by ranks started here, empty if unknown.

    Also empty if the config uses no GPU. A short-lived process looks: looking takes hundreds of
    megabytes of a GPU until the process ends, and forbids a later fork.
    """
    if "cuda" not in (config.storage.device, config.train.device) or config.testing.imitated_gpu:
        return []
    try:
        asked = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, timeout=SECONDS, check=True
        )
        return [int(free) for free in json.loads(asked.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []  # the ranks find out, and give the reason

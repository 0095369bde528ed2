"""The memory that is free on this machine's GPUs."""

from __future__ import annotations

import json
import subprocess
import sys

from ecrm.config.schema import Config

SECONDS = 60
"""After which a GPU that does not say what it has counts as unknown."""
PROGRAM = """
import json, torch
gpus = range(torch.cuda.device_count())
print(json.dumps([torch.cuda.mem_get_info(gpu)[0] for gpu in gpus]))
"""


def free_on_gpus(config: Config) -> list[int]:
    """Bytes free on each GPU that ranks started here can use, none where that is not known.

    Empty, too, where the config uses no GPU. A process that ends asks for it: whoever asks takes
    hundreds of megabytes of a GPU until its end, and must not fork afterwards.
    """
    if "cuda" not in (config.storage.device, config.train.device) or config.testing.imitated_gpu:
        return []
    try:
        asked = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, timeout=SECONDS, check=True
        )
        return [int(free) for free in json.loads(asked.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []  # its ranks find out, and say why

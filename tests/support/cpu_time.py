"""CPU time of a call, for bounds that a busy machine and a full heap cannot break."""

from __future__ import annotations

import time
from collections.abc import Callable


def least_cpu_seconds(call: Callable[[], object], tries: int = 3) -> float:
    """The least CPU time of a few calls, in seconds: garbage is rarely collected in each."""
    spent = []
    for _ in range(tries):
        began = time.process_time()
        call()
        spent.append(time.process_time() - began)
    return min(spent)

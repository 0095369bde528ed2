"""A rank's GPU as something that fails: out of memory, lost, or hung. Each ends the rank."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref

import torch

from ecrm.transport.pinned import register, unregister
from ecrm.transport.pulse import ASKS_EACH_LIMIT, Pulse

FAULT_WORDS = 60
"""A fault is told in so many words of what torch says of it, which may go on with advice."""


def is_lost(error: BaseException) -> bool:
    """Whether an error of torch means that this process has no use of its GPU any more.

    That is so after every error of CUDA but the lack of memory.
    """
    if isinstance(error, torch.AcceleratorError):
        return True
    said = str(error)
    return (
        isinstance(error, RuntimeError)
        and said.startswith(("CUDA error", "Triton Error [CUDA]"))
        and "CUBLAS_STATUS_" not in said  # an error of a library, after which CUDA goes on
    )


def fault_in_words(error: BaseException) -> str | None:
    """What has become of a GPU, in one line, where that is what an error tells."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"its GPU has no memory left: {_first_words(error)}"
    return f"its GPU is lost: {_first_words(error)}" if is_lost(error) else None


def _first_words(error: BaseException) -> str:
    words = str(error).strip().partition("\n")[0].split()
    return " ".join(words[:FAULT_WORDS])


def say_fault(rank: int, fault: str) -> None:
    """The one line about a rank that ends because of its GPU."""
    with contextlib.suppress(OSError):  # where nobody reads any more
        print(f"! rank {rank}: {fault}: the rank is killed", file=sys.stderr, flush=True)


class GpuPulse:
    """Asks a GPU for its pulse; the answers are for this rank's guard.

    An answer comes once everything is done that was given to the current stream before. So many
    kernels that are given at once, each of them short, look like one that hangs: whoever looks on
    must wait for longer than they take. A GPU that is lost ends the process.
    """

    def __init__(self, device: torch.device, pulse: Pulse, rank: int) -> None:
        self._device, self._pulse, self._rank = device, pulse, rank
        self._lock = threading.Lock()
        words = torch.frombuffer(pulse.memory, dtype=torch.int64)
        # where that fails, the copy below waits, as everything does that a hung GPU is asked for
        if register(device, words):
            weakref.finalize(self, unregister, words.data_ptr()).atexit = False
        self._answer = words[1:2]
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._answer.copy_(self._number.fill_(0))  # what first calls take is no hang
        pulse.ask = self.ask
        self.ask()

    def start(self) -> None:
        """Ask again and again, in a thread."""
        threading.Thread(target=self._ask_for_ever, name="gpu pulse", daemon=True).start()

    def ask(self) -> None:
        with self._lock:
            # counted before: to give it to a GPU that hangs may never return
            self._number.fill_(self._pulse.question())
            self._answer.copy_(self._number, non_blocking=True)

    def _ask_for_ever(self) -> None:
        try:
            while True:
                time.sleep(self._pulse.limit_seconds / ASKS_EACH_LIMIT)
                self.ask()
        except BaseException as error:
            say_fault(self._rank, fault_in_words(error) or f"its GPU has no pulse: {error!r}")
            os.kill(os.getpid(), signal.SIGKILL)

"""Failures of a rank's GPU: out of memory, lost, or hung. Each failure ends the rank."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref

import torch

from ecrm.device.pinned import register, unregister
from ecrm.device.pulse import ASKS_EACH_LIMIT, Pulse

FAULT_WORDS = 60
"""Most words of torch's message in the report of a fault; the message may go on with advice."""


def is_lost(error: BaseException) -> bool:
    """Whether an error of torch means the loss of the GPU for this process.

    True for every CUDA error except a lack of memory and errors of the cuBLAS library.
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
    """The fault of a GPU in one line, or `None` for an error without a GPU fault."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"its GPU has no memory left: {_first_words(error)}"
    return f"its GPU is lost: {_first_words(error)}" if is_lost(error) else None


def _first_words(error: BaseException) -> str:
    words = str(error).strip().partition("\n")[0].split()
    return " ".join(words[:FAULT_WORDS])


def say_fault(rank: int, fault: str) -> None:
    """Print the line about a rank ending because of its GPU."""
    with contextlib.suppress(OSError):  # the reader may be gone
        print(f"! rank {rank}: {fault}: the rank is killed", file=sys.stderr, flush=True)


class GpuPulse:
    """Asks a GPU for its pulse; the answers are for this rank's guard.

    An answer comes after all work given to the current stream before. Many short kernels given at
    once therefore look like a hanging kernel: the guard must wait longer than such kernels take. A
    lost GPU ends the process.
    """

    def __init__(self, device: torch.device, pulse: Pulse, rank: int) -> None:
        self._device, self._pulse, self._rank = device, pulse, rank
        self._lock = threading.Lock()
        words = torch.frombuffer(pulse.memory, dtype=torch.int64)
        # without registration the copy below waits for the GPU, without end for a hung GPU
        if register(device, words):
            weakref.finalize(self, unregister, words.data_ptr()).atexit = False
        self._answer = words[1:2]
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._answer.copy_(self._number.fill_(0))  # the time of first calls is no hang
        pulse.ask = self.ask
        self.ask()

    def start(self) -> None:
        """Ask again and again, in a thread."""
        threading.Thread(target=self._ask_for_ever, name="gpu pulse", daemon=True).start()

    def ask(self) -> None:
        with self._lock:
            # counted first: giving work to a hung GPU may never return
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

"""The GPUs that tests run on: one that is imitated, and a real one where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ecrm.kernels import dispatch
from ecrm.testing.imitated_gpu import imitated_gpu

NAMES = ("imitated", "cuda")


@dataclass(frozen=True)
class Gpu:
    """One of them, by its name."""

    name: str

    @property
    def is_imitated(self) -> bool:
        return self.name == "imitated"

    @property
    def kernels(self) -> str:
        """What its kernels run as. Interpreted ones take a while, so that plain torch stands in."""
        return "reference" if self.is_imitated else "triton"

    @property
    def sets(self) -> dict[str, Any]:
        """Keys of a config that uses it, beside the devices."""
        if self.is_imitated:
            return {"testing.imitated_gpu": True, "kernels.backend": self.kernels}
        return {}

    @property
    def missing(self) -> str | None:
        """Why tests on it are left out here, None if they are not."""
        if self.is_imitated:
            there = torch.cuda.is_available()
            return "a GPU is there: Triton compiles, and interprets nothing" if there else None
        return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU here"

    @contextmanager
    def used(self, kernels: str | None = None) -> Iterator[torch.device]:
        """Use it in this thread, with such kernels if they are named. Gives the device."""
        there = imitated_gpu() if self.is_imitated else nullcontext(torch.device("cuda", 0))
        with dispatch.used_on_gpu(kernels), there as device:
            yield device

"""What all ranks check first: their number, that they have the same, and the instruction set."""

from __future__ import annotations

from dataclasses import asdict

import torch

from ecrm.config.schema import Config
from ecrm.errors import UsageError
from ecrm.imitated_gpu import imitate_gpu
from ecrm.kernels import dispatch, native
from ecrm.rank.collective_check import collective_check, share_json
from ecrm.rank.consistency import Alike, Given, unlike
from ecrm.transport.base import Transport
from ecrm.wording import counted


def check_started(started: int, config: Config) -> None:
    """Raise UsageError unless `started`, the number of ranks, is what it must be."""
    if started != config.world_size:
        raise UsageError(
            f"this config needs {counted(config.world_size, 'rank')} ({config.ranks_in_words}, "
            f"{config.cluster.layout}), but {started} were started: "
            f"type mpirun --with-ft ulfm -n {config.world_size} ..., or ecrm launch"
        )


def check_alike(transport: Transport, mine: Given, alike: Alike) -> None:
    """Collective: raise UsageError on every rank unless all were started with the same."""
    ranks = {rank: Given(**fields) for rank, fields in share_json(transport, asdict(mine)).items()}
    if problem := unlike(ranks, alike):
        error = UsageError(problem)
        error.speaker = min(ranks)
        raise error


def check_kernels(transport: Transport, config: Config) -> None:
    """Collective: use the kernels that the config names, and the device of rows.

    Raises UsageError on every rank where the machine of one lacks them.
    """

    def use() -> None:
        use_instruction_set(config.kernels.instruction_set)
        use_device(config)

    collective_check(transport, use)


def use_instruction_set(name: str) -> None:
    """Have the kernels use an instruction set. Raises UsageError where this machine lacks it."""
    try:
        native.use(native.instruction_set() if name == "auto" else name)
    except ValueError as error:
        raise UsageError(
            f"kernels.instruction_set is {name}: {error}", {"kernels.instruction_set": "auto"}
        ) from None


def use_device(config: Config) -> None:
    """Have this thread use the device of rows. Raises UsageError where this machine has none."""
    dispatch.use_on_gpu(config.kernels.backend)
    if config.testing.imitated_gpu:
        imitate_gpu()
    elif config.storage.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"storage.device is cuda, but torch {torch.__version__} finds no GPU here",
            {"storage.device": "cpu"},
        )

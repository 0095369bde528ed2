"""What all ranks check first: their number, that they have the same, and the instruction set."""

from __future__ import annotations

from dataclasses import asdict

from ecrm.config.schema import Config
from ecrm.errors import UsageError
from ecrm.kernels import native
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
    """Collective: use the kernels that the config names.

    Raises UsageError on every rank where the machine of one lacks them.
    """
    collective_check(transport, lambda: use_instruction_set(config.kernels.instruction_set))


def use_instruction_set(name: str) -> None:
    """Have the kernels use an instruction set. Raises UsageError where this machine lacks it."""
    try:
        native.use(native.instruction_set() if name == "auto" else name)
    except ValueError as error:
        raise UsageError(
            f"kernels.instruction_set is {name}: {error}", {"kernels.instruction_set": "auto"}
        ) from None

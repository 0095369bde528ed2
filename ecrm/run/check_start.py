"""The first checks of all ranks: number of ranks, equal inputs, and the instruction set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from ecrm.base.allocate import CPU
from ecrm.base.wording import counted
from ecrm.config.schema import Config
from ecrm.errors import UsageError
from ecrm.kernels import native
from ecrm.process.device import DEVICES, device_of, trained_on, use_device
from ecrm.process.gpu import GpuPulse
from ecrm.run.collective_check import collective_check, share_json
from ecrm.run.consistency import Alike, Given, unlike
from ecrm.transport.base import Transport


def check_started(started: int, config: Config) -> None:
    """Raise UsageError unless `started`, the number of ranks, is the config's number."""
    if started != config.world_size:
        raise UsageError(
            f"this config needs {counted(config.world_size, 'rank')} ({config.ranks_in_words}, "
            f"{config.cluster.layout}), but {started} were started: "
            f"type mpirun --with-ft ulfm -n {config.world_size} ..., or ecrm launch"
        )


def check_alike(transport: Transport, mine: Given, alike: Alike) -> None:
    """Collective: raise UsageError on every rank unless all were started with equal inputs."""
    ranks = {rank: Given(**fields) for rank, fields in share_json(transport, asdict(mine)).items()}
    if problem := unlike(ranks, alike):
        raise UsageError(problem).on_all_ranks(min(ranks))


def check_kernels(transport: Transport, config: Config) -> None:
    """Collective: use the kernels and the devices named in the config.

    Raises UsageError on every rank if some rank's machine lacks the kernels or the devices, or if
    the model would get different bits on some rank.
    """

    def use() -> None:
        use_instruction_set(config.kernels.instruction_set)
        use_device(config)

    collective_check(transport, use)
    check_trained_on(share_json(transport, trained_on(config)))
    devices = {device_of(config, name) for name in DEVICES} - {CPU}
    if devices and transport.pulse is not None:
        GpuPulse(devices.pop(), transport.pulse, transport.rank).start()


def check_trained_on(of_ranks: Mapping[int, str]) -> None:
    """Raise UsageError unless all ranks train on equal devices: any rank may take over a slot.

    `of_ranks` names the device of each rank, in words.
    """
    first, *others = sorted(of_ranks)
    for rank in others:
        if of_ranks[rank] != of_ranks[first]:
            raise UsageError(
                f"rank {first} trains the model on {of_ranks[first]}, rank {rank} on "
                f"{of_ranks[rank]}, which come to other bits",
                otherwise="give all ranks the same model of GPU and the same torch",
            ).on_all_ranks(first)


def use_instruction_set(name: str) -> None:
    """Have the kernels use an instruction set. Raises UsageError if this machine lacks the set."""
    try:
        native.use(native.instruction_set() if name == "auto" else name)
    except ValueError as error:
        raise UsageError(
            f"kernels.instruction_set is {name}: {error}", {"kernels.instruction_set": "auto"}
        ) from None

"""The inputs of one rank: its kernels and devices, and the data of a config's run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecrm.base.allocate import CPU
from ecrm.base.wording import counted
from ecrm.config.schema import Config
from ecrm.data.dataset import CriteoDataset
from ecrm.data.dataset_info import read_manifest
from ecrm.errors import UsageError
from ecrm.kernels import native
from ecrm.process.device import DEVICES, device_of, use_device
from ecrm.process.gpu import GpuPulse
from ecrm.run.consistency import Alike
from ecrm.run.plan import plan
from ecrm.transport.base import Transport

OF_CONFIG = Alike(
    "data and config",
    {"data": "other data"},
    "copy the prepared data and the config to every host",
)
OF_SCRIPT = Alike(
    "script and config",
    {"script": "another script"},
    "copy the script and the config to every host, and give it the same arguments",
)
_OF_DATA = ("rows", "tables", "files")  # of the manifest; names of sources may differ


def check_started(started: int, config: Config) -> None:
    """Raise UsageError unless `started`, the number of ranks, is the config's number."""
    if started != config.world_size:
        raise UsageError(
            f"this config needs {counted(config.world_size, 'rank')} ({config.ranks_in_words}, "
            f"{config.cluster.layout}), but {started} were started: "
            f"type mpirun --with-ft ulfm -n {config.world_size} ..., or ecrm launch"
        )


def use_kernels(transport: Transport, config: Config) -> None:
    """Use the kernels and the devices named in the config.

    Raises UsageError if this machine lacks the kernels or the devices.
    """
    use_instruction_set(config.kernels.instruction_set)
    use_device(config)
    devices = {device_of(config, name) for name in DEVICES} - {CPU}
    if devices and transport.pulse is not None:
        GpuPulse(devices.pop(), transport.pulse, transport.rank).start()


def use_instruction_set(name: str) -> None:
    """Have the kernels use an instruction set. Raises UsageError if this machine lacks the set."""
    try:
        native.use(native.instruction_set() if name == "auto" else name)
    except ValueError as error:
        raise UsageError(
            f"kernels.instruction_set is {name}: {error}", {"kernels.instruction_set": "auto"}
        ) from None


def open_data(config: Config) -> None:
    """Open the data of a config's run. Raises UsageError and DataError."""
    CriteoDataset.open(
        config.data.path, config.model.max_rows_per_table or None, config.data.eval_fraction
    )
    plan(config)


def data_of(config: Config) -> dict[str, Any]:
    """The data of a config's run that must be the same on all ranks."""
    return of_manifest(read_manifest(Path(config.data.path)))


def of_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a dataset's `manifest` that must be the same on all ranks."""
    return {name: manifest[name] for name in _OF_DATA}

"""The inputs of one rank: its kernels and devices, and the data of a config's run."""

from __future__ import annotations

from typing import Any

from ecrm.base.allocate import CPU
from ecrm.base.errors import UsageError
from ecrm.base.wording import counted
from ecrm.config.schema import Config
from ecrm.data.columns.table import Table
from ecrm.data.dataset import CriteoDataset
from ecrm.data.described import Described, describe
from ecrm.kernels import native
from ecrm.process.device import DEVICES, device_of, use_device
from ecrm.process.gpu import GpuPulse
from ecrm.run.consistency import Alike
from ecrm.run.plan import plan
from ecrm.transport.base import Transport

FACTORS = "pooling_factors"
"""The input with the lookups of tables, which decide the places of whole tables."""
OF_CONFIG = Alike(
    "data and config",
    {"data": "other data"},
    "copy the prepared data and the config to every host",
)
OF_SCRIPT = Alike(
    "script and config",
    {"script": "another script", FACTORS: "other pooling_factors"},
    "copy the script and the config to every host, and give it the same arguments",
)


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
    (Table if _described(config).is_table else CriteoDataset.open)(config.data.path)
    plan(config)


def data_of(config: Config) -> dict[str, Any]:
    """The data of a config's run that must be the same on all ranks."""
    return alike(_described(config))


def alike(data: Described) -> dict[str, Any]:
    """The part of a dataset that must be the same on all ranks; names of sources may differ."""
    return {"rows": data.rows, "tables": data.tables, "layout": data.layout, "files": data.sums}


def _described(config: Config) -> Described:
    return describe(config.data.path, config.data.eval_fraction)

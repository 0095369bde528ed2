"""What all ranks check before anything else: their number, data, config, and instruction set."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ecrm.config.schema import Config
from ecrm.data.dataset import CriteoDataset
from ecrm.data.dataset_info import read_manifest
from ecrm.errors import UsageError
from ecrm.kernels import native
from ecrm.process.preflight import host_name
from ecrm.rank.collective_check import collective_check, share_json
from ecrm.run.plan import plan
from ecrm.train.consistency import Given, given, unlike
from ecrm.transport.base import Transport
from ecrm.wording import counted


def check_inputs(transport: Transport, config: Config) -> CriteoDataset:
    """Collective: open the data, and use the kernels that the config names.

    Raises UsageError and DataError, on every rank, where one rank cannot, or has another config or
    other data than most.
    """
    started = len(transport.live)
    dataset: CriteoDataset
    dataset, steps = collective_check(transport, lambda: _open(started, config))
    _check_alike(transport, config, steps)
    collective_check(transport, lambda: use_instruction_set(config.kernels.instruction_set))
    return dataset


def _open(started: int, config: Config) -> tuple[CriteoDataset, int]:
    """The data and the number of steps, where `started`, the number of ranks, is what it must be.

    Raises UsageError and DataError.
    """
    if started != config.world_size:
        raise UsageError(
            f"this config needs {counted(config.world_size, 'rank')} ({config.ranks_in_words}, "
            f"{config.cluster.layout}), but {started} were started: "
            f"type mpirun --with-ft ulfm -n {config.world_size} ..., or ecrm launch"
        )
    dataset = CriteoDataset.open(
        config.data.path, config.model.max_rows_per_table or None, config.data.eval_fraction
    )
    return dataset, plan(config)


def _check_alike(transport: Transport, config: Config, steps: int) -> None:
    """Raise UsageError on every rank unless all have the same data, config and number of steps."""
    manifest = collective_check(transport, lambda: read_manifest(Path(config.data.path)))
    mine = asdict(given(host_name(), config, manifest, steps))
    ranks = {rank: Given(**fields) for rank, fields in share_json(transport, mine).items()}
    if problem := unlike(ranks):
        error = UsageError(problem)
        error.speaker = min(ranks)
        raise error


def use_instruction_set(name: str) -> None:
    """Have the kernels use an instruction set. Raises UsageError where this machine lacks it."""
    try:
        native.use(native.instruction_set() if name == "auto" else name)
    except ValueError as error:
        raise UsageError(
            f"kernels.instruction_set is {name}: {error}", {"kernels.instruction_set": "auto"}
        ) from None

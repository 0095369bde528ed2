"""The first checks of the ranks of a config's run: number of ranks, data, config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecrm.config.schema import Config
from ecrm.data.dataset import CriteoDataset
from ecrm.data.dataset_info import read_manifest
from ecrm.process.preflight import host_name
from ecrm.run.check_start import check_alike, check_started
from ecrm.run.collective_check import collective_check
from ecrm.run.consistency import Alike, Given, given_of
from ecrm.run.plan import plan
from ecrm.transport.base import Transport

ALIKE = Alike(
    "data and config",
    {"data": "other data"},
    "copy the prepared data and the config to every host",
)
_OF_DATA = ("rows", "tables", "files")  # of the manifest; names of sources may differ


def check_inputs(transport: Transport, config: Config) -> None:
    """Collective: check the data and the config before the recipe runs.

    Raises UsageError and DataError, on every rank, if a rank cannot open the data, or has a config
    or data different from most ranks.
    """
    started = len(transport.live)
    steps = collective_check(transport, lambda: _open(started, config))
    manifest = collective_check(transport, lambda: read_manifest(Path(config.data.path)))
    check_alike(transport, given(host_name(), config, manifest, steps), ALIKE)


def _open(started: int, config: Config) -> int:
    """Open the data; return the number of steps. Checks `started`, the number of ranks.

    Raises UsageError and DataError.
    """
    check_started(started, config)
    CriteoDataset.open(
        config.data.path, config.model.max_rows_per_table or None, config.data.eval_fraction
    )
    return plan(config)


def given(host: str, config: Config, manifest: Mapping[str, Any], steps: int) -> Given:
    """A rank's `Given`: its config, and its data by the `manifest` of the dataset."""
    return given_of(host, config, steps, data={name: manifest[name] for name in _OF_DATA})

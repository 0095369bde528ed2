"""One rank's engine, built from a config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from ecrm.base.allocate import Allocate, lazy_zeros
from ecrm.config.schema import Config
from ecrm.data.dataset import CriteoDataset
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.engine.rollback import Durable
from ecrm.model.dlrm import build_dense_parts, resolve_dense_arch
from ecrm.model.replica import FlatDenseReplica
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import RowSpace, Table, row_spaces
from ecrm.placement.view import View
from ecrm.process.device import device_of
from ecrm.process.ready import Loading, ready_spares
from ecrm.protection.base import Protection
from ecrm.run.policy import policy_of
from ecrm.storage import resolve_backend
from ecrm.transport.base import Transport

DENSE_FEATURES = 13


def dense_of(engine: Engine) -> FlatDenseReplica:
    """The dense replica of a dense holder."""
    dense = engine.state.dense
    assert dense is not None
    return cast(FlatDenseReplica, dense)  # made by `build_engine`


def spaces_of(config: Config, dataset: CriteoDataset) -> tuple[RowSpace, ...]:
    """The row spaces of the tables, with their optimizer."""
    return row_spaces(
        [replace(table, optimizer=_optimizer(config)) for table in _tables(config, dataset)]
    )


def _tables(config: Config, dataset: CriteoDataset) -> list[Table]:
    return [Table(name, rows, config.model.embedding_dim) for name, rows in dataset.tables]


def _optimizer(config: Config) -> SparseOptimizer:
    train = config.train
    return SparseOptimizer(train.sparse_optimizer, train.sparse_lr, train.sparse_eps)


def build_engine(
    config: Config,
    transport: Transport,
    protection: Protection,
    view: View,
    dataset: CriteoDataset,
    hooks: Hooks,
    durable: Durable | None = None,
    allocate: Allocate = lazy_zeros,
    rows_seed: int | None = None,
) -> Engine:
    """The engine of a rank at step 0, with the roles in `view`.

    `rows_seed` is the seed of rows never updated by a step, train.seed by default.
    """
    model, train = config.model, config.train
    arch, backend = resolve_dense_arch(model.dense_arch), resolve_backend(config.storage.backend)
    tables, optimizer = _tables(config, dataset), _optimizer(config)
    loading = Loading(transport.rank, view, ready_spares(protection), arch, backend, optimizer)

    def event(fields: dict[str, Any]) -> None:
        if fields["event"] == "view":
            loading.heed(fields["view"])
        hooks.event(fields)

    def make_dense() -> FlatDenseReplica:
        parts = build_dense_parts(
            arch, DENSE_FEATURES, len(tables), model.bottom_mlp, model.top_mlp, train.seed
        )
        device = device_of(config, "train.device")
        return FlatDenseReplica(parts, train.dense_optimizer, train.dense_lr, device)

    return Engine(
        transport=transport,
        tables=tables,
        view=view,
        protection=protection,
        make_store=loading.make_store,
        make_dense=make_dense,
        seed=train.seed if rows_seed is None else rows_seed,
        policy=policy_of(config, protection),
        hooks=replace(hooks, event=event, committed=lambda: hooks.committed()),
        durable=durable,
        allocate=allocate,
        device=device_of(config, "storage.device"),
        slots_on=device_of(config, "train.device"),
    )

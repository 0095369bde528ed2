"""One rank of the built-in trainer, built."""

from __future__ import annotations

from collections.abc import Callable

from ecrm.base.allocate import Allocate
from ecrm.data.dataset import CriteoDataset
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.model.dlrm import resolve_dense_arch
from ecrm.process.stop_signals import StopSignals
from ecrm.run.build_rank import Rank
from ecrm.run.build_rank import build_rank as build_any_rank
from ecrm.run.claim import ClaimedRun
from ecrm.run.connect import Cluster
from ecrm.train.build_engine import build_engine
from ecrm.transport.base import Transport


def build_rank(
    transport: Transport,
    run: ClaimedRun,
    dataset: CriteoDataset,
    cluster: Cluster,
    stop: StopSignals,
    waiting: Callable[[str], None],
) -> Rank:
    """Collective: the rank with its tables, as from `ecrm.run.build_rank`."""

    def make_engine(transport: Transport, hooks: Hooks, allocate: Allocate) -> Engine:
        return build_engine(
            run.config,
            transport,
            cluster.protection,
            cluster.view,
            dataset,
            hooks,
            run.durable.tier,
            allocate,
            run.start.identity["rows_seed"],
        )

    config = run.config
    own = resolve_dense_arch(config.model.dense_arch) == "native"
    features = len(dataset.tables) if own and config.train.device == "cuda" else None
    return build_any_rank(transport, run, cluster, stop, waiting, make_engine, features=features)

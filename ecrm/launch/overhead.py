"""The cost of failures and of protection on a larger cluster: a model to first order. Pure.

Overheads are shares of the time of training alone. Every failure costs by itself. The measured
inputs are the medians of benchmarks/results/protections.csv, in MEASURED.
`benchmarks/overhead_model.py` has the formulas in words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredInputs:
    """The measured inputs of the model.

    - `parity_cost`: parity's share of a step. `async_share`: the cost of an asynchronous checkpoint
      as a multiple of a synchronous one.
    - `lost_seconds`: training time lost to a kill. `notice_seconds`: the recovery without any load.
    - `kept`: throughput while rebuilding, as a share. `extra` is m/k.
    """

    parity_cost: float
    async_share: float
    lost_seconds: float
    kept: float
    notice_seconds: float
    rebuild_bytes_per_second: float
    extra: float


@dataclass(frozen=True)
class ClusterModel:
    """The assumptions of the model.

    Bytes of rows and state of all tables, servers, MTBF of a server in seconds, and the bytes a
    second that a server writes to or reads from storage.
    """

    table_bytes: float
    servers: int
    server_mtbf_seconds: float
    storage_bytes_per_second: float

    @property
    def mtbf(self) -> float:
        """Seconds between failures of any server."""
        return self.server_mtbf_seconds / self.servers

    @property
    def checkpoint_seconds(self) -> float:
        return self.table_bytes / self.servers / self.storage_bytes_per_second


@dataclass(frozen=True)
class Overhead:
    """Shares of the time of training alone: `normal`, and what `failures` cost.

    `lost` is the seconds per failure without new training, `slow` the seconds of slower training.
    """

    normal: float
    failures: float
    lost: float
    slow: float = 0.0

    @property
    def total(self) -> float:
        return self.normal + self.failures


def best_interval(cluster: ClusterModel) -> float:
    """Seconds between checkpoints at which waiting and redoing cost least, to first order."""
    return math.sqrt(2 * cluster.checkpoint_seconds * cluster.mtbf)


def of_checkpoints(
    cluster: ClusterModel, interval: float, measured: MeasuredInputs, background: bool = False
) -> Overhead:
    """Checkpoints every `interval` seconds; training waits, or they are in the `background`.

    After a failure each file is read twice: once to check its checksum, once to load its rows.
    """
    seconds = cluster.checkpoint_seconds
    given = measured.async_share * seconds if background else seconds
    lost = interval / 2 + (seconds if background else 0.0) + 2 * seconds + measured.notice_seconds
    return Overhead(given / interval, lost / cluster.mtbf, lost)


def of_erasure(cluster: ClusterModel, measured: MeasuredInputs) -> Overhead:
    """Erasure coding with the (k, m) that was measured."""
    rebuilding = (
        cluster.table_bytes
        / cluster.servers
        * (1 + measured.extra)
        / measured.rebuild_bytes_per_second
    )
    cost = measured.lost_seconds + rebuilding * (1 - measured.kept)
    return Overhead(measured.parity_cost, cost / cluster.mtbf, measured.lost_seconds, rebuilding)


MEASURED = {
    "dense-heavy": MeasuredInputs(0.0024, 0.7105634, 0.07909, 0.9658, 0.02731, 16_724_798, 0.25),
    "embedding-heavy": MeasuredInputs(
        0.02475, 0.4253247, 0.1152, 0.9331, 0.01792, 27_646_682, 0.25
    ),
    "criteo": MeasuredInputs(0.0525, 1.2825719, 0.06218, 0.8851, 0.01469, 1_922_354, 0.25),
}
"""The measured inputs of three models, with k = 4 and m = 1."""


def seconds_to_loss(
    servers: int, survived: int, server_mtbf_seconds: float, rebuild_seconds: float
) -> float:
    """Mean seconds until more servers are lost at once than `survived`, from the exact chain.

    Deaths are independent, with an exponential time of mean `server_mtbf_seconds` for each server.
    Lost shards are rebuilt side by side, each in an exponential time of mean `rebuild_seconds`. A
    dead server is replaced at once.
    """
    total, step = 0.0, 0.0
    for lost in range(survived + 1):
        dies = (servers - lost) / server_mtbf_seconds
        heals = lost / rebuild_seconds
        step = (1.0 + heals * step) / dies  # mean time from `lost` to `lost` + 1 servers at once
        total += step
    return total


def fatal_choices(servers: int, k: int, m: int) -> int:
    """Number of choices of m + 1 servers, with a shard each, that hold units of one stripe.

    A stripe lies on k + m successive shards of the circle of shards: a choice is fatal if a gap
    between two chosen shards passes over all shards outside of some stripe.
    """
    gap = servers - (k + m) + 1
    ways, sign = 0, 1
    for wide in range(1, m + 2):
        left = servers - wide * (gap - 1) - 1
        if left < m:
            break
        ways += sign * math.comb(m + 1, wide) * math.comb(left, m)
        sign = -sign
    return servers * ways // (m + 1)


def seconds_to_stripe_loss(
    servers: int, k: int, m: int, server_mtbf_seconds: float, rebuild_seconds: float
) -> float:
    """Mean seconds until more than m servers with units of one stripe are lost at once.

    The assumptions are those of `seconds_to_loss`. Each fatal choice of servers is a chain by
    itself, and the rates of all choices are summed: to first order, and too short if anything.
    """
    of_choice = seconds_to_loss(m + 1, m, server_mtbf_seconds, rebuild_seconds)
    return of_choice / fatal_choices(servers, k, m)

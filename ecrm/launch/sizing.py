"""`ecrm plan`: memory, traffic, overhead, rebuilding and data loss for stripes of k + m.

Memory comes from ecrm/launch/memory_needs.py, costs from ecrm/launch/overhead.py. Imports no torch:
the tables of a script come as a `Survey`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ecrm.base.errors import UsageError
from ecrm.base.wording import counted
from ecrm.config import Config, load_config
from ecrm.config.script import Script
from ecrm.launch.memory_needs import MB, Need, Needs, RowLoad, libraries, of_server
from ecrm.launch.overhead import (
    MEASURED,
    ClusterModel,
    best_interval,
    of_checkpoints,
    of_erasure,
    seconds_to_stripe_loss,
)
from ecrm.protection.kinds import MOST_UNITS
from ecrm.protection.rebuild_pace import BUSY, PERIOD, most_rows
from ecrm.run.plan import plan
from ecrm.run.surveyed import Survey

PARITY_UNITS = (1, 2, 3)
DATA_UNITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
YEAR = 365.25 * 86400
SAFE_SECONDS = 10 * YEAR
"""The mean time to data loss of a recommended protection, at least."""
MUCH_OF_A_STEP = 0.25
"""The share of a step from which a recommendation tells the time of parity on the network."""
COSTS = MEASURED["embedding-heavy"]
"""The measured costs of failures; the steady cost is told of all measured models."""


@dataclass(frozen=True)
class Planned:
    """The cluster to plan for, one server to a host.

    Bytes of memory, and of network a second, are those of a host. `mtbf_seconds` is the mean time
    between failures of a server. Raises UsageError for fewer than 2 servers.
    """

    servers: int
    memory_bytes: float
    network_bytes: float
    mtbf_seconds: float
    step_seconds: float

    def __post_init__(self) -> None:
        if self.servers < 2:
            raise UsageError("--servers 1: a protection takes 2 servers at least: type --servers 4")

    def settings(self, k: int, m: int) -> list[str]:
        """The settings of a run with stripes of k + m."""
        stripes = [f"protection.k={k}", f"protection.m={m}"]
        return [f"cluster.servers={self.servers}", "protection.name=erasure", *stripes]


@dataclass(frozen=True)
class Candidate:
    """The consequences of stripes of `k` + `m`.

    - `memory`: bytes of a server's host, with a single rank, once every row is updated.
    - `traffic`: bytes of parity that a server sends in a step, at most.
    - `steady`: the lowest and the highest share of time for parity, over the measured models.
    - `failures`: the share of time that failures cost.
    - `rebuild_seconds`: until a lost shard is whole. `loss_seconds`: mean time to data loss.
    """

    k: int
    m: int
    memory: int
    traffic: float
    steady: tuple[float, float]
    failures: float
    rebuild_seconds: float
    loss_seconds: float


@dataclass(frozen=True)
class Model:
    """The model to plan for.

    - `config(own)`: the config of a run with the settings `own`. Raises UsageError.
    - `loads(config)`: the rows of the tables, by width.
    - `told`: a line about the tables, "" for none.
    """

    config: Callable[[Sequence[str]], Config]
    loads: Callable[[Config], Sequence[RowLoad]]
    told: str = ""


def of_config(name: str, overrides: Sequence[str]) -> Model:
    """The model of a config."""
    return Model(
        lambda own: load_config(name, [*overrides, *own]),
        lambda config: [Needs(config, plan(config)).load],
    )


def of_script(script: Script, overrides: Sequence[str], survey: Survey) -> Model:
    """The model of a script, known from a survey."""
    loads = [RowLoad(*each) for each in survey.rows]
    return Model(
        lambda own: script.load_config([*overrides, *own]),
        lambda config: loads,
        survey.in_words(script.typed),
    )


def candidates(model: Model, given: Planned) -> list[Candidate]:
    """A candidate for every k and m that fits on the servers, by m and k. Raises UsageError."""
    found = []
    for m in PARITY_UNITS:
        most = min(given.servers, MOST_UNITS) - m
        for k in sorted({k for k in (*DATA_UNITS, most) if 1 <= k <= most}):
            found.append(candidate(model, given, k, m))
    return found


def _server(model: Model, given: Planned, k: int, m: int) -> tuple[Config, Need, float]:
    """The config with stripes of k + m, the need of a server, and the server's records."""
    config = model.config(given.settings(k, m))
    server, records = Need(), 0.0
    for load in model.loads(config):
        need = of_server(load, config)
        server += replace(need, process=0)
        records += (need.rows + need.parity) / load.record
    return config, server, records


def candidate(model: Model, given: Planned, k: int, m: int) -> Candidate:
    """The candidate of a model with stripes of k + m."""
    config, server, records = _server(model, given, k, m)
    traffic = server.undo * m / (1 + m) / config.protection.commit_interval
    shard = (server.rows + server.parity) or 1
    rebuild = rebuild_seconds(records, shard / (records or 1), config, given)
    table_bytes = server.rows * given.servers
    cluster = ClusterModel(table_bytes, given.servers, given.mtbf_seconds, given.network_bytes)
    measured = replace(COSTS, extra=m / k, rebuild_bytes_per_second=shard / rebuild)
    on_wire = _on_wire(traffic, given)
    costs = [m * each.parity_cost for each in MEASURED.values()]
    return Candidate(
        k=k,
        m=m,
        memory=server.total + libraries(config, 1),
        traffic=traffic,
        steady=(max(min(costs), on_wire), max(max(costs), on_wire)),
        failures=of_erasure(cluster, measured).failures,
        rebuild_seconds=rebuild,
        loss_seconds=seconds_to_stripe_loss(given.servers, k, m, given.mtbf_seconds, rebuild),
    )


def _on_wire(traffic: float, given: Planned) -> float:
    """The share of a step in which the network sends the bytes `traffic` of a server."""
    return traffic / given.network_bytes / given.step_seconds


def rebuild_seconds(rows: float, record: float, config: Config, given: Planned) -> float:
    """Seconds until the `rows` of a lost shard, data and parity of `record` bytes, are back.

    Steps rebuild as many rows as RebuildPace allows at most; with a share below 1 these are four
    of six steps. Survivors decode the rows, so the new host gets each row once from the network,
    within the share of time for rebuilding.
    """
    protection = config.protection
    most = most_rows(protection.rebuild_rows_per_step, math.ceil(record))
    by_network = rows * record / given.network_bytes / protection.rebuild_share
    turns = 1.0 if protection.rebuild_share == 1 else PERIOD / BUSY
    return max(turns * rows / most * given.step_seconds, by_network)


def recommended(found: Sequence[Candidate], given: Planned) -> Candidate | None:
    """The candidate with the least memory among those that fit and are safe, `None` if none fits.

    Safe is a mean time to data loss of SAFE_SECONDS. Without a safe candidate that fits: the
    candidate that fits with the longest time.
    """
    fitting = [each for each in found if each.memory <= given.memory_bytes]
    safe = [each for each in fitting if each.loss_seconds >= SAFE_SECONDS]
    if safe:
        return min(safe, key=lambda each: (each.m, each.memory))
    return max(fitting, key=lambda each: each.loss_seconds, default=None)


def in_words(model: Model, given: Planned) -> list[str]:
    """The lines of `ecrm plan`: assumptions, a row for each candidate, and a recommendation.

    Raises UsageError.
    """
    found = candidates(model, given)
    table_bytes = _server(model, given, found[0].k, found[0].m)[1].rows * given.servers
    cluster = ClusterModel(table_bytes, given.servers, given.mtbf_seconds, given.network_bytes)
    lines = [
        *filter(None, [model.told]),
        f"{table_bytes / MB:,.0f} MB of rows and optimizer state on "
        f"{counted(given.servers, 'server')}, one to a host; a server fails every "
        f"{given.mtbf_seconds / 3600:,.0f} h, any of them every {cluster.mtbf / 3600:,.1f} h; "
        f"a step takes {given.step_seconds * 1e3:,.0f} ms",
        *_table(found, given),
        "memory: a server's host once every row is updated; traffic: parity sent by a server in a",
        "step, at most; steady: share of time for parity, of the measured models; failures: share",
        "of time lost to failures; data loss: mean time until more than m servers with units of",
        "one stripe are lost at once, supposing that a spare replaces each dead server",
    ]
    interval = best_interval(cluster)
    cost = of_checkpoints(cluster, interval, COSTS)
    lines.append(
        f"checkpoints in place of parity, best every {_time(interval)}: steady {cost.normal:.2%}, "
        f"failures {cost.failures:.2%}; a failure loses {_time(cost.lost)}"
    )
    best = recommended(found, given)
    if best is None:
        least = min(each.memory for each in found)
        lines.append(
            f"no stripes fit into {given.memory_bytes / MB:,.0f} MB; the least need is "
            f"{least / MB:,.0f} MB: type more --servers, or --memory {math.ceil(least / 1e9)}"
        )
        return lines
    weak = "" if best.loss_seconds >= SAFE_SECONDS else ", less than 10 years"
    lines.append(
        f"recommended: --servers {given.servers} --protection erasure -k {best.k} -m {best.m}: "
        f"{best.memory / MB:,.0f} MB a host, {_time(best.loss_seconds)} to data loss{weak}"
        f"{_on_a_slow_network(best, given)}"
    )
    return lines


def _on_a_slow_network(best: Candidate, given: Planned) -> str:
    """A warning where the network takes MUCH_OF_A_STEP for parity at most, else an empty text."""
    share = _on_wire(best.traffic, given)
    if share < MUCH_OF_A_STEP:
        return ""
    return f"; parity alone takes up to {share:.0%} of a step on this network"


def _table(found: Sequence[Candidate], given: Planned) -> list[str]:
    rows = [
        ("k", "m", "memory MB", "fits", "traffic MB", "steady", "failures", "rebuild", "data loss")
    ]
    for each in found:
        low, high = each.steady
        rows.append(
            (
                str(each.k),
                str(each.m),
                f"{each.memory / MB:,.0f}",
                "yes" if each.memory <= given.memory_bytes else "no",
                f"{each.traffic / MB:,.2f}",
                f"{low:.1%} to {high:.1%}" if high > low else f"{high:.1%}",
                f"{each.failures:.3%}" if each.failures >= 1e-5 else "< 0.001%",
                _time(each.rebuild_seconds),
                _time(each.loss_seconds),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]


def _time(seconds: float) -> str:
    """A time in words, such as "4.2 s", "12 min" or "3,100 years"."""
    if seconds > 1e6 * YEAR:
        return "over 1,000,000 years"
    for unit, size in (("years", YEAR), ("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:,.1f} s"

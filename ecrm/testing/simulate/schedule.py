"""A fault schedule drawn from a seed: cluster, job, and probabilities of deaths."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from ecrm.base.wording import counted
from ecrm.placement.assignment import CannotKeepApart
from ecrm.placement.initial_values import InitFunction, Uniform
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table
from ecrm.protection.kinds import KINDS
from ecrm.testing.simulate.promise import ROLLING_BACK
from ecrm.testing.simulate.session_model import (
    SessionModel,
    draw_features,
    draw_model,
    draw_more,
    draw_variants,
)
from ecrm.testing.simulate.workload import Workload
from ecrm.testing.simulated_transport import LinkFaults

SUITES = ("survivable", "fatal", "returning", "links", "sessions")

FATAL_SHARE = 0.15
"""Share of the schedules of sessions with a possible death beyond the promise."""

ROLLING_BACK_SHARE = 0.12
"""Share of the schedules of sessions with protections that roll back to files after any death."""

EXACT_WHILE_SHARE = 0.06
"""Share of the schedules of sessions with `none` or `stateless`.

`none` is exact without failures, `stateless` while no server dies.
"""

ELSEWHERE_SHARE = 0.5
"""Share of the resumed runs that resume on a different cluster."""

OWN_SHARE = 0.25
"""Share of schedules with a drawn optimizer and initial values per table.

Tables of equal width may then differ.
"""

OWN = (
    None,
    SparseOptimizer("adam", 0.02),
    SparseOptimizer("adam", 0.02, weight_decay=0.1, decoupled=True),
    SparseOptimizer("rowwise_adagrad", 0.05, weight_decay=0.02),
    SparseOptimizer("sgd", 0.05, weight_decay=0.02),
)

BEGIN = (None, None, Uniform(0.1, 0.4), InitFunction(torch.nn.init.normal_))

WIDE_SHARE = 0.08
"""Share of schedules with wider stripes: k up to 8, and m up to 4 (Cauchy code from m = 4 on)."""


GPU_SHARE = 0.02
"""Share of the schedules of the small job with rows on an imitated GPU."""

WHOLE_TABLES_SHARE = 0.4
"""Share of schedules with small tables whole on shards."""

ROUNDS_SHARE = 0.25
"""Share of the schedules of sessions with bfloat16 on the wire."""

INTERPRETED_SHARE = 0.03
"""Share of the schedules on an imitated GPU with kernels run by Triton's interpreter.

The interpreter is ten times slower, and needs an installed triton.
"""


@dataclass(frozen=True)
class Schedule:
    """A job on a cluster, and the chances of faults.

    - `deaths`: most deaths of ranks in the whole run.
    - `call_death`: probability that a transport call kills the calling rank.
    - `cascade`: the same probability for the calls of a recovery.
    - `phase_death`: probability that a phase of the engine kills the rank.
    - `together`: probability that a death takes along a second rank, and with hosts the rank's
      whole host.
    - `lost_touch`: probability that a call fails at a rank without any death, a few times a run.
    - `fatal`: whether a rank may die although the promise does not cover the death.
    - `returns`: probability that a dead rank comes back.
    - `network`: the network of ranks that talk over links; `None` for calls without links.
    - `model`: the model trained by a session, with the session's tables; `None` for the small job.
    - `later`: the cluster for resuming from checkpoints; `None` for the same cluster.
    """

    seed: int
    suite: str
    workload: Workload
    deaths: int
    call_death: float
    phase_death: float
    cascade: float
    together: float
    lost_touch: float = 0.0
    fatal: bool = False
    returns: float = 0.0
    network: LinkFaults | None = None
    model: SessionModel | None = None
    later: Workload | None = None

    def __str__(self) -> str:
        w = self.workload
        hosts = f" on {counted(len(set(w.domains)), 'host')}" if w.domains else ""
        return (
            f"{_cluster(w)}{hosts}, {w.protection} k={w.k} m={w.m}, "
            f"{_on_gpu(w)}{counted(w.slots, 'slot')}, "
            f"{counted(w.steps, 'step')}, "
            f"{'bfloat16 on the wire, ' if w.rounds else ''}"
            f"commit every {w.commit_interval}, "
            f"{_optimizers(w) if self.model is None else self.model}, "
            f"rebuild {counted(w.rebuild_rows_per_step, 'row')} a step in {w.rebuild_share:.0%} "
            "of time, "
            f"scrub {counted(w.scrub_rows_per_step, 'row')} a step, "
            f"{'reshaping' if w.reshape else 'no reshaping'}, up to {counted(self.deaths, 'death')}"
            f"{', calls that fail though nobody died' if self.lost_touch else ''}"
            f"{', dead ranks come back' if self.returns else ''}"
            f"{'' if self.network is None else f', over links: {self.network}'}"
            f"{'' if self.later is None else f', going on on {_cluster(self.later)}'}"
        )


def _cluster(workload: Workload) -> str:
    return (
        f"{counted(workload.servers, 'server')}{_shards(workload)} + "
        f"{counted(workload.trainers, 'trainer')} + "
        f"{counted(workload.spares, 'spare')} {workload.layout}"
        f"{' with whole tables' if workload.whole_tables else ''}"
    )


def _shards(workload: Workload) -> str:
    shards = workload.shards_per_server
    return f" of {counted(shards, 'shard')}" if shards > 1 else ""


def _optimizers(workload: Workload) -> str:
    """The names of the optimizers of all tables, with a note on falling rates."""
    own = [table.optimizer for table in workload.tables]
    names = dict.fromkeys(workload.optimizer if one is None else one.name for one in own)
    return " and ".join(names) + (" with rates that fall" if workload.falls else "")


def _on_gpu(workload: Workload) -> str:
    if workload.rows_on == "cpu":
        return ""
    but = f", but for ranks {', '.join(map(str, workload.on_cpu))}" if workload.on_cpu else ""
    return f"rows on an imitated GPU with {workload.gpu_kernels}{but}, "


def parse_seed(text: str) -> int:
    """The seed in a decimal number, or the hash of a text such as a commit hash."""
    return (
        int(text)
        if text.isdecimal()
        else int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    )


def draw(seed: int, suite: str) -> Schedule:
    """The schedule of a seed; the same seed gives the same schedule."""
    rng = random.Random(f"{suite} {seed}")
    m = rng.choice((1, 1, 1, 2, 2, 3))
    k = rng.randint(1, 4)
    servers = k + m + rng.choice((0, 0, 1, 2, 4))
    trainers = rng.randint(1, 3)
    layout = rng.choice(("dedicated", "colocated"))
    dims = rng.sample((4, 8, 12), rng.randint(1, 2))
    tables = tuple(
        Table(f"t{number}", rng.choice((1, 3, 17, 40, 90)), rng.choice(dims))
        for number in range(rng.randint(1, 4))
    )
    workload = Workload(
        seed=rng.randrange(1 << 30),
        tables=tables,
        slots=trainers * rng.randint(1, 2),
        steps=rng.randint(3, 12),
        ids_per_slot=rng.choice((1, 4, 12)),
        optimizer=rng.choice(("sgd", "rowwise_adagrad", "adagrad")),
        servers=servers,
        trainers=trainers,
        spares=rng.choice((0, 0, 1, 2, 4)),
        layout=layout,
        k=k,
        m=m,
        commit_interval=rng.choice((1, 1, 2, 3, 8)),
        rebuild_rows_per_step=rng.choice((1, 4, 16, 1000)),
    )
    workload = replace(workload, reshape=rng.random() < 0.8, look_ahead=rng.random() < 0.7)
    shortage = m + 1 - workload.world_size
    if shortage > 0:
        workload = replace(workload, spares=workload.spares + shortage)
    workload = replace(workload, domains=_hosts(rng, workload))
    schedule = Schedule(
        seed=seed,
        suite=suite,
        workload=workload,
        deaths=rng.randint(1, 8),
        call_death=rng.choice((0.002, 0.01, 0.03)),
        phase_death=rng.choice((0.0, 0.01, 0.03)),
        cascade=rng.choice((0.0, 0.05, 0.3)),
        together=rng.choice((0.0, 0.2, 0.6)),
        fatal=suite == "fatal",
    )
    # New draws come last: draws of earlier versions stay equal for every seed. New are scrubbing,
    # chains, replication, lost touch, wide stripes, lookups between steps, optimizers of tables.
    workload = replace(workload, scrub_rows_per_step=rng.choice((0, 1, 16, 1000)))
    if workload.k == 1:
        name = rng.choice(("erasure", "chain", "replicate", "replicate"))
        workload = replace(
            workload,
            protection=name,
            scrub_rows_per_step=workload.scrub_rows_per_step if KINDS[name].parity else 0,
        )
    schedule = replace(schedule, lost_touch=rng.choice((0.0, 0.0, 0.002, 0.02)))
    # The share of a former trait, with rows on the CPU alone: seeds keep their schedules.
    may_have_gpu = rng.random() >= 0.1
    if rng.random() < WIDE_SHARE and workload.kind.any_k:
        k, m = rng.choice(((6, 2), (8, 2), (5, 3), (3, 4), (4, 4)))
        workload = replace(workload, k=k, m=m, servers=k + m + rng.choice((0, 0, 1)), domains=None)
        workload = replace(workload, domains=_hosts(rng, workload))
    workload = replace(workload, looks_between=rng.random() < 0.3)
    if rng.random() < OWN_SHARE:
        tables = tuple(replace(table, optimizer=rng.choice(OWN)) for table in workload.tables)
        workload = replace(workload, falls=rng.random() < 0.5)
        tables = tuple(replace(table, initial=rng.choice(BEGIN)) for table in tables)
        workload = replace(workload, tables=tables)
    if suite == "sessions":
        workload = replace(workload, tables=(), falls=rng.random() < 0.3)
        fatal = rng.random() < FATAL_SHARE
        # a separate generator: the draws above stay equal for every seed
        more = random.Random(f"more of {suite} {seed}")
        model = draw_more(draw_model(rng), workload.steps, more)
        if more.random() < ROLLING_BACK_SHARE:
            name = more.choice(ROLLING_BACK)
            workload = replace(
                workload, protection=name, k=1, m=0, scrub_rows_per_step=0, domains=None
            )
            fatal = False
            if KINDS[name].needs_checkpoints:
                model = replace(model, checkpoints=model.checkpoints or 3)
            else:  # the run goes on from memory-mapped files
                model = replace(model, checkpoints=0, stops=0)
        model = draw_variants(
            draw_features(model, workload.falls, random.Random(f"parts of {seed}"))
        )
        seldom = random.Random(f"cluster {seed}")
        if seldom.random() < EXACT_WHILE_SHARE and not workload.kind.rolls_back:
            name = seldom.choice(("none", "stateless"))
            workload = replace(
                workload, protection=name, k=1, m=0, scrub_rows_per_step=0, domains=None
            )
            fatal = False
            if not KINDS[name].keeps_deltas:
                schedule = replace(schedule, deaths=0, lost_touch=0.0)
        if model.stops and seldom.random() < ELSEWHERE_SHARE:
            schedule = replace(schedule, later=_elsewhere(seldom, workload))
        schedule = replace(schedule, model=model, fatal=fatal)
    elif suite == "returning":
        workload = replace(workload, steps=workload.steps * 3)
        schedule = replace(schedule, deaths=3 * schedule.deaths, returns=rng.choice((0.5, 0.9, 1)))
    elif suite == "links":
        more = random.Random(f"network {seed}")
        schedule = replace(
            schedule, network=LinkFaults.drawn(more), returns=more.choice((0.0, 0.0, 0.5))
        )
    elif may_have_gpu:
        workload = _with_gpu(f"where rows lie {suite} {seed}", workload)
    if suite == "sessions":
        rounds = random.Random(f"wire {seed}").random() < ROUNDS_SHARE
        workload = replace(workload, rounds=rounds)
        if schedule.later is not None:
            schedule = replace(schedule, later=replace(schedule.later, rounds=rounds))
    rng = random.Random(f"where tables lie {suite} {seed}")
    if schedule.later is not None:
        later = replace(schedule.later, whole_tables=rng.random() < WHOLE_TABLES_SHARE)
        schedule = replace(schedule, later=later)
    if not workload.kind.rows_in_files:
        workload = replace(workload, whole_tables=rng.random() < WHOLE_TABLES_SHARE)
    # a separate generator: the draws above stay equal for every seed
    more = random.Random(f"share {suite} {seed}")
    workload = replace(workload, rebuild_share=more.choice((1.0, 1.0, 0.05)))
    if workload.kind.any_k:
        workload = replace(workload, shards_per_server=more.choice((1, 1, 1, 2, 3)))
    return replace(schedule, workload=workload)


def _elsewhere(rng: random.Random, workload: Workload) -> Workload:
    """The same job on a different cluster, with a newly drawn protection unless m is 0."""
    m, k, more = rng.choice((1, 1, 2)), rng.randint(1, 3), rng.choice((0, 1, 2))
    other = replace(
        workload,
        servers=k + m + more,
        trainers=rng.randint(1, min(3, workload.slots)),
        spares=rng.choice((0, 1, 2)),
        layout=rng.choice(("dedicated", "colocated")),
        commit_interval=rng.choice((1, 2, 4)),
        domains=None,
    )
    name = rng.choice(("erasure", "chain", "replicate")) if k == 1 else "erasure"
    if workload.m == 0:
        return other
    return replace(other, protection=name, k=k, m=m, scrub_rows_per_step=0)


def _with_gpu(seed: str, workload: Workload) -> Workload:
    """The workload, seldom on an imitated GPU; in half of these cases some ranks are on the CPU.

    A separate generator draws the place: the draws of the seed stay equal.
    """
    rng = random.Random(seed)
    if rng.random() >= GPU_SHARE:
        return workload
    interprets = rng.random() < INTERPRETED_SHARE and find_spec("triton") is not None
    kernels = "triton" if interprets else "reference"
    mixed = rng.random() < 0.5
    on_cpu = tuple(rank for rank in range(workload.world_size) if mixed and rng.random() < 0.5)
    return replace(workload, rows_on="imitated", gpu_kernels=kernels, on_cpu=on_cpu)


def _hosts(rng: random.Random, workload: Workload) -> tuple[int, ...] | None:
    """The host of every rank, in a quarter of the schedules.

    `None` without hosts, or if the drawn hosts cannot keep stripe members apart.
    """
    if rng.random() >= 0.25:
        return None
    hosts = rng.randint(
        workload.k + workload.m, max(workload.k + workload.m, workload.world_size - 1)
    )
    domains = tuple(rank % hosts for rank in range(workload.world_size))
    try:
        replace(workload, domains=domains).initial_view()
    except CannotKeepApart:
        return None
    return domains

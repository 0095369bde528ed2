"""One fault schedule drawn from a seed: the cluster, the job, and how likely ranks are to die."""

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

SUITES = ("survivable", "fatal", "sessions")

FATAL_SHARE = 0.15
"""Share of the schedules of sessions in which one death more than is covered may come."""

ROLLING_BACK_SHARE = 0.12
"""Schedules of sessions with protections that go back to files, whoever has died."""

EXACT_WHILE_SHARE = 0.06
"""Those with protections that are exact while nothing fails, or no server: `none`, `stateless`."""

ELSEWHERE_SHARE = 0.5
"""Share of the runs that go on from checkpoints of others on which another cluster does."""

OWN_SHARE = 0.25
"""Share of schedules in which tables have optimizers and initial values of their own.

Several of one width, too.
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
"""Share of schedules with wider stripes: k up to 8, and m up to 4, whose code is the Cauchy one."""


GPU_SHARE = 0.02
"""Share of the schedules of the small job in which rows are on an imitated GPU."""

INTERPRETED_SHARE = 0.03
"""Share of those in which Triton's interpreter runs the kernels, ten times slower.

Where triton is installed.
"""


@dataclass(frozen=True)
class Schedule:
    """A job on a cluster and the faults to draw for it.

    `deaths` is how many ranks may die in the whole run; each transport call of each rank kills its
    rank with probability `call_death`, or `cascade` in the calls of a recovery, each phase of the
    engine with `phase_death`; a death takes another rank along with probability `together`, and
    with hosts the whole host with the same. A call fails at one rank though nobody died with
    probability `lost_touch`, a few times a run. In a `fatal` one, one rank may die whose death is
    not covered. `model` is what a session trains, None for the small job; it has the tables then.
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
    model: SessionModel | None = None
    later: Workload | None = None

    def __str__(self) -> str:
        w = self.workload
        hosts = f" on {counted(len(set(w.domains)), 'host')}" if w.domains else ""
        return (
            f"{_cluster(w)}{hosts}, {w.protection} k={w.k} m={w.m}, "
            f"{_on_gpu(w)}{counted(w.slots, 'slot')}, "
            f"{counted(w.steps, 'step')}, "
            f"commit every {w.commit_interval}, "
            f"{_optimizers(w) if self.model is None else self.model}, "
            f"rebuild {counted(w.rebuild_rows_per_step, 'row')} a step, "
            f"scrub {counted(w.scrub_rows_per_step, 'row')} a step, "
            f"{'reshaping' if w.reshape else 'no reshaping'}, up to {counted(self.deaths, 'death')}"
            f"{', calls that fail though nobody died' if self.lost_touch else ''}"
            f"{'' if self.later is None else f', going on on {_cluster(self.later)}'}"
        )


def _cluster(workload: Workload) -> str:
    return (
        f"{counted(workload.servers, 'server')} + {counted(workload.trainers, 'trainer')} + "
        f"{counted(workload.spares, 'spare')} {workload.layout}"
    )


def _optimizers(workload: Workload) -> str:
    """The optimizers of all tables by name, and whether their rates fall."""
    own = [table.optimizer for table in workload.tables]
    names = dict.fromkeys(workload.optimizer if one is None else one.name for one in own)
    return " and ".join(names) + (" with rates that fall" if workload.falls else "")


def _on_gpu(workload: Workload) -> str:
    if workload.rows_on == "cpu":
        return ""
    but = f", but for ranks {', '.join(map(str, workload.on_cpu))}" if workload.on_cpu else ""
    return f"rows on an imitated GPU with {workload.gpu_kernels}{but}, "


def parse_seed(text: str) -> int:
    """A seed from a decimal number or, as a commit hash is, from any other text."""
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
    # Drawn last, so that everything else of a seed is as it was before there were scrubbing,
    # chains, replication, lost touch, wide stripes, lookups between steps, and optimizers of
    # tables.
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
        # from numbers of their own, so that what is drawn above stays as it is
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
            else:  # it goes on from its files
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
    elif may_have_gpu:
        workload = _with_gpu(f"where rows lie {suite} {seed}", workload)
    return replace(schedule, workload=workload)


def _elsewhere(rng: random.Random, workload: Workload) -> Workload:
    """The same job on another cluster, with another protection unless that goes back to files."""
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
    """The same, seldom on an imitated GPU, drawn by itself: all else of a seed stays as it was.

    In half of these, ranks here and there have theirs on the CPU.
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
    """The host of each rank, in a quarter of the schedules.

    Only where the ranks drawn can keep stripe members apart on hosts.
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

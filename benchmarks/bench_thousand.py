"""What a rank of a thousand pays for the number of ranks, counted on one core without a network.

    python benchmarks/bench_thousand.py           # half a minute
    python benchmarks/bench_thousand.py --smoke   # 20 ranks, to a temporary file; for the tests

  messages  20,000 rows of 64 bytes of a slot, asked of 1,000 shards: split, requests, gradients,
            all messages packed, the replies read, the rows collected.
  shard     What a shard does in a step for 1,000 slots of 20 rows each: messages read, gradients
            summed, rows updated; requests compared with those before a failure, the next rows found
            and packed for all slots.
  ledger    What each of 1,000 survivors tells all others at the begin of a recovery, and their
            joint state. The bytes are of all messages that a rank sends.
  plan      14 hosts of 72 ranks, (10,4): one host is dead, and its shards find new hosts. Every
            survivor makes the same plan.
  digest    A million rows of 64 bytes for `model_digest`.

Each round makes every case five times, in turn with the others: the first finds cold caches, the
median of the rest is the round's figure. Times are CPU time of the thread, so that other work on
the machine counts little. Messages cost MPI nothing here, and Python's calls of MPI for each peer
are left out. Writes benchmarks/results/thousand.csv.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ecrm.engine.ledger import Ledger, Noticed
from ecrm.kernels.row_digest import row_digest
from ecrm.placement.assignment import initial_view
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view_change import plan_recovery
from ecrm.process.memory import keep_freed_memory
from ecrm.transport import wire
from ecrm.transport.alone import LoneTransport
from ecrm.transport.message import Part, Received
from lib import measure, tables
from lib.kernel_slots import messages_cases, shard_call


@dataclass(frozen=True)
class Size:
    """How much is counted: rounds, ranks, rows of a slot, hosts and ranks a host, (k, m), rows."""

    rounds: int
    ranks: int
    slot_rows: int
    hosts: int
    per_host: int
    k: int
    m: int
    rows: int


FULL = Size(21, 1000, 20_000, 14, 72, 10, 4, 1_000_000)
SMOKE = Size(2, 20, 500, 7, 3, 5, 2, 1000)
DIM = 16
CALLS = 5


@dataclass
class Case:
    """A job; `amount` is what it tells beside its time: bytes a rank sends, or rows."""

    name: str
    ranks: int
    call: Callable[[], object]
    amount: int


class AllAlike(LoneTransport):
    """Every rank says what this one says; counts the bytes that this one sends to the others."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.sent_bytes = 0

    def share(self, tensors: Sequence[Part]) -> dict[int, list[Received]]:
        packed = wire.pack(tensors)
        self.sent_bytes += packed.nbytes * (self.ranks - 1)
        return {rank: wire.unpack(packed) for rank in range(self.ranks)}


def ledger_case(size: Size) -> Case:
    """The joint ledger of all survivors of a failure that this rank has seen."""
    shape = StripeShape(size.ranks, size.k, size.m)
    view = initial_view("colocated", shape, size.ranks, 0, size.ranks, size.m + 1)
    why = {0: "exchange: MPI_ERR_PROC_FAILED: Process Failure"}
    mine = Ledger(7, view, 1, False, False, (0,), Noticed(7, "update", 1), why=why)
    transport = AllAlike(size.ranks)
    joint = mine.agreed(transport)
    if joint.commits != 7 or len(joint.why) != size.ranks:
        raise SystemExit("the joint ledger is not of all ranks")
    return Case("ledger", size.ranks, lambda: mine.agreed(transport), transport.sent_bytes)


def plan_case(size: Size) -> Case:
    """New hosts for the shards of a dead host."""
    ranks = size.hosts * size.per_host
    shape = StripeShape(ranks, size.k, size.m)
    domains = [rank % size.hosts for rank in range(ranks)]
    view = initial_view("colocated", shape, ranks, 0, ranks, size.m + 1, domains)
    dead = [rank for rank in range(ranks) if domains[rank] == 1]
    after = plan_recovery(view, dead, shape, size.m + 1)
    if len(after.rebuilding) != size.per_host or set(dead) & set(after.shards):
        raise SystemExit("the plan leaves shards on dead ranks")
    return Case("plan", ranks, lambda: plan_recovery(view, dead, shape, size.m + 1), len(dead))


def digest_case(size: Size) -> Case:
    """The digest of rows of one shard."""
    values = torch.rand(size.rows, DIM, generator=torch.Generator().manual_seed(1))
    numbers = torch.arange(size.rows)
    return Case("digest", 1, lambda: row_digest(values, numbers), size.rows)


def messages_case(size: Size) -> Case:
    """All messages of a slot."""
    case = messages_cases(size.ranks, size.slot_rows)[1]
    return Case("messages", size.ranks, case.contenders[0].call, case.rows)


def shard_case(size: Size) -> Case:
    """A step of a shard."""
    of_slot = size.slot_rows // size.ranks
    return Case("shard", size.ranks, shard_call(size.ranks, of_slot), of_slot * size.ranks)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def main(words: Sequence[str] | None = None) -> None:
    """Count all cases in rounds, write the CSV, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help=f"default {FULL.rounds}")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument(
        "--csv", type=Path, help="where to write; default: benchmarks/results/thousand.csv"
    )
    options = parser.parse_args(words)
    size = SMOKE if options.smoke else FULL
    keep_freed_memory()
    torch.set_num_threads(1)
    cases = [
        make(size) for make in (messages_case, shard_case, ledger_case, plan_case, digest_case)
    ]
    about, rows = measure.device(), list[dict[str, Any]]()
    for case in cases:
        case.call()
    for number in range(options.rounds or size.rounds):
        for case in cases:
            cold, *warm = (_seconds(case.call) for _ in range(CALLS))
            rows.append(
                {
                    "case": case.name,
                    "round": number,
                    "ranks": case.ranks,
                    "cold_cpu_ms": round(1e3 * cold, 4),
                    "cpu_ms": round(1e3 * statistics.median(warm), 4),
                    "amount": case.amount,
                    **about,
                }
            )
    csv = measure.target("thousand.csv", options.csv, options.smoke)
    measure.write_csv(csv, rows)
    print("\n".join(tables.thousand(rows)))
    print(f"written to {csv}")


if __name__ == "__main__":
    main()

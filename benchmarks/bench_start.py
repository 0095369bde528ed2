"""The start of a run, with and without the fork server, and where each byte of a server is.

    python benchmarks/bench_start.py                  # about 20 minutes on 2 cores
    python benchmarks/bench_start.py --part memory    # one part; the CSV keeps the other
    python benchmarks/bench_start.py --smoke          # 4 and 6 ranks, to a temporary file

  start   Seconds from `ecrm launch` to the end of the first step, for 7 ranks (quickstart) and 46
          ranks (drill-long). `one import` is ECRM's way: one process of the host imports torch and
          torchrec, and all ranks are forked from it. `own import` is the same without: every rank
          imports for itself. The two take turns. Beside the time stands the memory of a rank after
          its first steps: Pss, and the part that no other process shares.
  memory  5 servers at (4,1), 2 trainers, embedding-heavy, all rows handed out: the Pss of the
          servers over the bytes of their rows, by kind of memory.

Pss counts a page that n processes share as an nth of a page in each. All figures are from
/proc/PID/smaps of the ranks. Writes benchmarks/results/start.csv.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecrm.launch.run_state import RankState, rank_states
from lib import measure, tables
from lib.interleaved import ENDLESS, InterleavedRun, Program, RunFailed, launched, start
from lib.memory import memory_of

AS_ECRM = "ecrm"
ONE, OWN = "one import", "own import"
"""Contenders: ranks forked from one process that has imported, and ranks that import."""
START_SECONDS = 600.0
STEPS = 10
"""Steps before memory is read."""


@dataclass(frozen=True)
class Size:
    """How much is run: rounds, rows of data, (config, settings) of starts, settings for memory."""

    rounds: int
    rows: int
    starts: tuple[tuple[str, Mapping[str, Any]], ...]
    memory: Mapping[str, Any]


FULL = Size(
    rounds=3,
    rows=200_000,
    starts=(("quickstart", {}), ("drill-long", {})),
    memory={
        **measure.REGIMES["embedding-heavy"],
        "cluster.servers": 5,
        "cluster.trainers": 2,
        "train.global_batch": 4096,
        "protection.k": 4,
    },
)
SMOKE = Size(
    rounds=1,
    rows=12_000,
    starts=(("tiny", {"cluster.spares": 0}), ("tiny", {})),
    memory={
        "cluster.servers": 2,
        "cluster.trainers": 1,
        "protection.k": 1,
        "train.global_batch": 64,
    },
)
SHARED = {
    "data.eval_fraction": 0.01,
    "train.epochs": 0,
    "train.log_every_steps": 1,
    "train.steps": ENDLESS,
    "protection.verify_parity_at_end": False,
    "checkpoint.at_end": False,
}


def act_as_ecrm(arguments: list[str]) -> int:
    """The `ecrm` command without the fork server. It starts its ranks as this program."""
    import ecrm.launch.launcher as launcher
    import ecrm.process.guard as guard

    mpirun_line = launcher.mpirun_line
    launcher.mpirun_line = lambda config, words, **options: mpirun_line(
        config, [words[0], __file__, AS_ECRM, *words[3:]], **options
    )
    guard.join = lambda *given, **more: None
    from ecrm.cli.commands import main

    return main(arguments)


def program(name: str, config: str, sets: Mapping[str, Any], folder: Path) -> Program:
    """An endless run that tells of every step."""
    words = launched([config, *measure.set_words(sets)], folder)
    if name == ONE:
        return words
    own = [sys.executable, __file__, AS_ECRM, *words.words[3:]]
    return Program(own, words.finished, words.environment)


@dataclass(frozen=True)
class Seen:
    """A run after its first steps.

    Seconds to the end of the first step, its ranks with their memory, the Pss of its other
    processes (guards, mpirun, launcher, fork server).
    """

    seconds: float
    ranks: list[tuple[RankState, dict[str, int]]]
    beside: int


def seen(name: str, config: str, sets: Mapping[str, Any], folder: Path, ends: bool) -> Seen:
    """Start a run, and look at it after STEPS steps. It `ends` by itself, or is asked to."""
    began = time.time()
    run = start(name, program(name, config, sets, folder))
    try:
        finished = _wait(run)
        states = rank_states(folder / "ranks.json", set(), "training")
        ranks = [(state, memory_of(state.pid)) for state in states]
        others = set(run.members) - {state.pid for state in states}
        beside = sum(memory_of(pid)["pss"] for pid in others if _is_there(pid))
        if ends:
            run.process.wait(START_SECONDS)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise RunFailed(f"{name}: {error}") from error
    finally:
        run.end()
    return Seen(min(at for _, at in finished) - began, ranks, beside)


def _is_there(pid: int) -> bool:
    """Whether a process exists and has memory of its own."""
    try:
        return bool(Path(f"/proc/{pid}/smaps").read_bytes())
    except OSError:
        return False


def _wait(run: InterleavedRun) -> Sequence[tuple[int, float]]:
    """The finished steps, once there are STEPS."""
    deadline = time.monotonic() + START_SECONDS
    while len(finished := run.program.finished()) < STEPS:
        run.check()
        if time.monotonic() > deadline:
            raise RunFailed(f"{run.name} did not come to step {STEPS} in {START_SECONDS:g} s")
        time.sleep(0.1)
    return finished


def started(number: int, data: Path, scratch: Path, size: Size) -> Iterator[dict[str, Any]]:
    """A round of starts: both contenders in turn, the order changing from round to round."""
    for place, (config, sets) in enumerate(size.starts):
        for name in (ONE, OWN) if number % 2 == 0 else (OWN, ONE):
            folder = scratch / f"{number}-{place}-{name.replace(' ', '-')}"
            found = seen(name, config, {"data.path": str(data), **SHARED, **sets}, folder, False)
            memories = [memory for _, memory in found.ranks]
            yield {
                "part": "start",
                "round": number,
                "config": config,
                "contender": name,
                "ranks": len(memories),
                "first_step_seconds": round(found.seconds, 2),
                "pss_bytes_of_a_rank": round(statistics.mean(each["pss"] for each in memories)),
                "private_bytes_of_a_rank": round(
                    statistics.mean(each["private"] for each in memories)
                ),
                "beside_bytes": found.beside,
            }


def of_servers(number: int, data: Path, scratch: Path, size: Size) -> dict[str, Any]:
    """The memory of all servers of a run by kind, beside the rows and parity that they count."""
    folder = scratch / f"{number}-memory"
    sets = {
        "data.path": str(data),
        **SHARED,
        "protection.m": 1,
        "cluster.spares": 0,
        "cluster.layout": "dedicated",
        "storage.prefault": True,
        **size.memory,
        "train.steps": 3 * STEPS,
    }
    config = "quickstart" if size is FULL else "tiny"
    found = seen(ONE, config, sets, folder, True)
    summary = json.loads((folder / "summary.json").read_text())
    servers = [memory for state, memory in found.ranks if "server" in state.role]
    counted = [of for of in summary["memory_bytes_per_rank"] if of["shards"]]
    total = {kind: sum(each[kind] for each in servers) for kind in servers[0]}
    held = {kind: sum(each[kind] for each in counted) for kind in ("data", "parity", "undo")}
    return {
        "part": "memory",
        "round": number,
        "config": config,
        "ranks": len(servers),
        **{f"{kind}_bytes": count for kind, count in {**held, **total}.items()},
    }


def main(words: Sequence[str] | None = None) -> None:
    """Run the parts in rounds, write the CSV, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help=f"default {FULL.rounds}")
    parser.add_argument("--part", choices=("start", "memory"), help="default: both")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument(
        "--csv", type=Path, help="where to write; default: benchmarks/results/start.csv"
    )
    options = parser.parse_args(words)
    size = SMOKE if options.smoke else FULL
    csv = measure.target("start.csv", options.csv, options.smoke)
    parts = ("start", "memory") if options.part is None else (options.part,)
    about = measure.device()
    try:
        rows: list[dict[str, Any]] = [
            row for row in tables.read_rows(csv) or () if row["part"] not in parts
        ]
    except tables.TableError as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory() as scratch:
        data = measure.prepare(options.data or Path(scratch), size.rows)
        try:
            for number in range(options.rounds or size.rounds):
                found = started(number, data, Path(scratch), size) if "start" in parts else ()
                rows += [{**row, **about} for row in found]
                if "memory" in parts:
                    rows.append({**of_servers(number, data, Path(scratch), size), **about})
                measure.write_csv(csv, rows)
        except RunFailed as error:
            sys.exit(str(error))
    print("\n".join([*tables.start(rows), "", *tables.server_memory(rows)]))
    print(f"written to {csv}")


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_ECRM]:
        sys.exit(act_as_ecrm(sys.argv[2:]))
    main()

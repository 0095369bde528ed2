"""A session on three imitated hosts with slow links, by placement of tables, beside TorchRec.

    python benchmarks/bench_network.py            # 1 Gb/s, about 20 minutes on 2 cores
    python benchmarks/bench_network.py --smoke    # tiny, to a temporary file; what the tests run
    python benchmarks/bench_network.py --megabits 200 --rounds 1 --ids-per-bag 20

A host is a network namespace with a cable of its own. The cable is a process that lets frames pass
at a rate, each way (tests/support/programs/cable.cpp), so root is needed, and no kernel module.
Each host runs one process, server and trainer in one. All train one model, DLRM, as in
bench_session.py:
  rows       a session with cluster.placement=rows
  tables     a session with cluster.placement=tables: bags of whole tables are summed by servers
  torchrec   TorchRec DistributedModelParallel over gloo, the planner's plan, unprotected

Sessions have erasure with k=2 and m=1, and a commit in every step. Runs take turns by rounds; the
machine's cores are shared by all hosts and cables. A step is the median of the steps after the
first ones. Both placements must end with one model: the benchmark ends with an error if not. Writes
benchmarks/results/network.csv.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lib import measure, tables
from lib.told_steps import ToldSteps
from lib.torchrec_peer import ENVIRONMENT, peer_words

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.drilling import Run
from support.host_loss import trainings
from support.imitated_hosts import ImitatedHosts, why_not

SCRIPT = Path(__file__).with_name("session_dlrm.py")
HOSTS = 3
PORT = "29511"
RUN_SECONDS = 600
CONTENDERS = ("rows", "tables", "torchrec")
MODEL = {
    **measure.REGIMES["embedding-heavy"],
    "model.max_rows_per_table": 50_000,
    "data.eval_fraction": 0.01,
    "train.epochs": 0,
}
SMOKE = {**MODEL, "model.max_rows_per_table": 500, "model.embedding_dim": 16}
SMOKE |= {"model.bottom_mlp": [16], "model.top_mlp": [8, 1]}
CLUSTER = {
    "cluster.layout": "colocated",
    "cluster.servers": HOSTS,
    "cluster.trainers": HOSTS,
    "cluster.spares": 0,
    "protection.k": 2,
    "protection.m": 1,
    "protection.verify_parity_at_end": False,
    "checkpoint.at_end": False,
    "train.log_every_steps": 2,
}


def step_ms(finished: Sequence[tuple[int, float]], first: int) -> float:
    """The median step after the `first` ones, from (step, seconds) of finished steps."""
    steps = sorted(finished)[first:]
    return 1e3 * statistics.median(
        (after - before) / (last - this) for (this, before), (last, after) in pairwise(steps)
    )


def session(
    folder: Path, placement: str, sets: dict[str, Any], ids: int, rate: float, first: int
) -> tuple[float, float, str]:
    """Milliseconds of a step, megabytes sent by a rank in a step, and the model's hash."""
    own = ("quickstart", *measure.set_words(sets), "--ids-per-bag", str(ids))
    launched = {
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in {**CLUSTER, "cluster.placement": placement}.items()
    }
    with trainings(folder, folder) as start:
        training = start(HOSTS, launched, slots=1, script=(str(SCRIPT), *own), rate=rate)
        run: Run = training.finish()
    if run.code != 0:
        sys.exit(f"a session ended with {run.code}:\n{run.output}")
    finished = [(step, at) for event in run.events_of("progress") for step, at in event["finished"]]
    traffic = run.summary["traffic_bytes_per_rank"]
    outside = ("start", "evaluate", "finish")
    sent = sum(
        count for rank in traffic for name, count in rank["sent"].items() if name not in outside
    )
    return step_ms(finished, first), sent / len(traffic) / len(finished) / 1e6, run.model


def torchrec(
    folder: Path, sets: dict[str, Any], ids: int, rate: float, first: int
) -> tuple[float, float, str]:
    """Milliseconds of a step of the peer, a process on each host; bytes are not counted."""
    words = peer_words(
        "torchrec-planner",
        sets,
        folder / "result.json",
        ["--ids-per-bag", str(ids), "--tell", str(folder / "told")],
    )
    at = words.index("--nproc-per-node")
    with ImitatedHosts(HOSTS, rate=rate) as hosts:
        master = hosts.address("h1")
        started = []
        for number, name in enumerate(hosts.names):
            nodes = ["--nnodes", str(HOSTS), "--node-rank", str(number), "--nproc-per-node", "1"]
            nodes += ["--master-addr", master, "--master-port", PORT]
            line = ["ip", "netns", "exec", hosts.namespace(name), *words[:at], *nodes]
            started.append(
                subprocess.Popen(
                    [*line, *words[at + 2 :]],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    process_group=0,  # one session for all, as hosts of ECRM have
                    env={**os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0"},
                )
            )
        deadline = time.monotonic() + RUN_SECONDS
        for process in started:
            try:
                output, _ = process.communicate(timeout=max(1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                for each in started:
                    os.killpg(each.pid, signal.SIGKILL)
                sys.exit(f"TorchRec was not done after {RUN_SECONDS} s")
            if process.returncode:
                sys.exit(f"TorchRec ended with {process.returncode}:\n{output}")
    return step_ms(ToldSteps(folder / "told").finished(), first), float("nan"), ""


def main(words: Sequence[str] | None = None) -> None:
    """Run all contenders in rounds, write the CSV, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--megabits", type=float, default=1000.0, help="rate of a link, each way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ids-per-bag", type=int, action="append", help="default: 1 and 20")
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="default: all")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument("--csv", type=Path, help="default: benchmarks/results/network.csv")
    options = parser.parse_args(words)
    if reason := why_not():
        sys.exit(f"hosts cannot be imitated here: {reason}")
    steps, first, samples, rows = (6, 2, 16, 12_000) if options.smoke else (24, 6, 512, 200_000)
    csv = measure.target("network.csv", options.csv, options.smoke)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        data = measure.prepare(options.data or Path(scratch), rows, measure.ZIPF)
        for number in range(1 if options.smoke else options.rounds):
            for ids in options.ids_per_bag or (1, 20):
                sets = {
                    **CLUSTER,
                    **(SMOKE if options.smoke else MODEL),
                    "data.path": str(data),
                    "train.sparse_lr": 0.05 / ids,
                    "train.steps": steps,
                    "train.global_batch": HOSTS * samples,
                }
                models = set()
                for contender in options.contender or CONTENDERS:
                    folder = Path(scratch) / f"{number}-{ids}-{contender}"
                    folder.mkdir()
                    if contender == "torchrec":
                        ms, sent, model = torchrec(folder, sets, ids, options.megabits, first)
                    else:
                        rate = options.megabits
                        ms, sent, model = session(folder, contender, sets, ids, rate, first)
                        models.add(model)
                    found.append(
                        {
                            "contender": contender,
                            "ids_per_bag": ids,
                            "round": number,
                            "hosts": HOSTS,
                            "megabits": options.megabits,
                            "step_ms": round(ms, 1),
                            "samples_per_second": round(1e3 * HOSTS * samples / ms),
                            "sent_mb": "" if sent != sent else round(sent, 2),
                            **measure.device(),
                        }
                    )
                    print("\n".join(tables.network(found)), flush=True)
                    measure.write_csv(csv, found)
                if len(models) > 1:
                    sys.exit("the placements ended with different models: report this as a bug")
    print(f"written to {csv}")


if __name__ == "__main__":
    main()

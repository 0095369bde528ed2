"""What protection costs a step, and how a protected step compares with TorchRec's unprotected one.

    python benchmarks/bench_step.py            # both regimes, all contenders in every round; about 40 minutes on 2 cores
    python benchmarks/bench_step.py --smoke    # a minute, tiny; what the tests run

Contenders of one round run one after the other in a random order, with the same processes, model, batches and data:
  none        ECRM without protection
  erasure     k=4 m=1, a commit every step
  erasure-16  k=4 m=1, a commit every 16 steps
  torchrec-*  TorchRec DistributedModelParallel over gloo, by sharding plan (benchmarks/peer_torchrec.py), unprotected
Samples per second are the global batch over the median step. Ratios are of the same round, then their median.
Writes benchmarks/results/step.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import measure

RANKS = 5
SLOT_BATCH = {"dense-heavy": 1024, "embedding-heavy": 2048}
PROTECTION = {
    "none": {"protection.name": "none"},
    "erasure": {"protection.k": 4, "protection.m": 1},
    "erasure-16": {"protection.k": 4, "protection.m": 1, "protection.commit_interval": 16},
}
PEERS = ("planner", "column_wise")
BARS = [
    ("dense-heavy", "erasure", "none", 0.95),
    ("embedding-heavy", "erasure", "none", 0.85),
    ("embedding-heavy", "erasure-16", "none", 0.97),
    ("dense-heavy", "erasure", "torchrec", 1.0),
    ("embedding-heavy", "erasure", "torchrec", 1.0),
]


def settings(regime: str, data: Path, steps: int, smoke: bool) -> dict[str, Any]:
    """The config of one regime, protection left out."""
    batch = 64 if smoke else SLOT_BATCH[regime]
    sets = {
        **measure.REGIMES[regime],
        "data.path": str(data),
        "train.steps": steps,
        "train.epochs": 0,
        "train.global_batch": RANKS * batch,
        "train.log_every_steps": 0,
        "data.eval_fraction": 0.01,
        "cluster.layout": "colocated",
        "cluster.servers": RANKS,
        "cluster.trainers": RANKS,
        "cluster.spares": 0,
        "protection.verify_parity_at_end": False,
    }
    if smoke:
        sets["model.max_rows_per_table"] = 1000
    return sets


def ours(folder: Path, sets: dict[str, Any], name: str) -> dict[str, Any]:
    """One run of ECRM."""
    summary = measure.run(folder, {**sets, **PROTECTION[name]})
    seconds = summary["step_seconds"]["p50"]
    return {"step_ms": 1e3 * seconds, "samples_per_second": sets["train.global_batch"] / seconds, "logloss": summary["train_logloss"]}


def peer(folder: Path, sets: dict[str, Any], sharding: str) -> dict[str, Any]:
    """One run of TorchRec."""
    folder.mkdir()
    result = folder / "result.json"
    program = Path(__file__).with_name("peer_torchrec.py")
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), str(program), "quickstart", str(result)]
    done = subprocess.run(
        [sys.executable, *words, "--sharding", sharding, *measure.set_words(sets)],
        capture_output=True,
        text=True,
        timeout=measure.RUN_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    if done.returncode:
        sys.exit(f"the TorchRec peer failed:\n{done.stdout}{done.stderr}")
    told = json.loads(result.read_text())
    return {"step_ms": 1e3 * told["step_seconds"], "samples_per_second": told["samples_per_second"], "logloss": told["logloss"]}


def best_peer(rates: dict[str, float]) -> float:
    """The fastest of TorchRec's plans."""
    return max(rate for name, rate in rates.items() if name.startswith("torchrec"))


def ratio(rates: dict[str, float], one: str, other: str) -> float:
    """Samples per second of `one` over those of `other` in one round."""
    return rates[one] / (best_peer(rates) if other == "torchrec" else rates[other])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--regime", choices=tuple(measure.REGIMES), action="append")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rounds, steps = (1, 6) if arguments.smoke else (arguments.rounds, arguments.steps)
    output = arguments.output or measure.RESULTS / "step.csv"
    about = measure.device()
    rows: list[dict[str, Any]] = []
    by_round: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        data = measure.prepare(arguments.data or Path(scratch), 20_000 if arguments.smoke else 500_000)
        for regime in arguments.regime or measure.REGIMES:
            sets = settings(regime, data, steps, arguments.smoke)
            for number in range(rounds):
                contenders = [*PROTECTION, *(f"torchrec-{plan}" for plan in PEERS)]
                random.Random(number).shuffle(contenders)
                rates: dict[str, float] = {}
                for name in contenders:
                    folder = Path(scratch) / f"{regime}-{number}-{name}"
                    result = peer(folder, sets, name.partition("-")[2]) if name.startswith("torchrec") else ours(folder, sets, name)
                    rates[name] = result["samples_per_second"]
                    rows.append(
                        {
                            "regime": regime,
                            "round": number,
                            "contender": name,
                            "ranks": RANKS,
                            "global_batch": sets["train.global_batch"],
                            "steps": steps,
                            "step_ms": round(result["step_ms"], 2),
                            "samples_per_second": round(result["samples_per_second"]),
                            "train_logloss": round(result["logloss"], 6),
                            **about,
                        }
                    )
                    print(f"{regime:>15} round {number} {name:<18} {result['step_ms']:8.1f} ms a step", flush=True)
                by_round.setdefault(regime, []).append(rates)
        measure.write_csv(output, rows)
    for regime, one, other, bar in BARS:
        if regime in by_round:
            found = [ratio(rates, one, other) for rates in by_round[regime]]
            print(
                f"{regime:>15} {one} / {other}: {statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f}), bar {bar}"
            )


if __name__ == "__main__":
    main()

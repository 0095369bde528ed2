"""What a SIGKILL costs: the gap between two finished steps, throughput before, during and after, whole again after.

Each scenario is real training under mpirun on generated Criteo rows; the numbers come from events.jsonl. Writes
benchmarks/results/recovery.csv and prints the table of the README. `--smoke` runs one short scenario to a temporary file.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from ecrm.drill.run import read_run
from ecrm.drill.throughput import before_during_after

RESULTS = Path(__file__).with_name("results") / "recovery.csv"
GLOBAL_BATCH = 1024
SCENARIOS = {
    "server, spare takes over": (["cluster.spares=1"], ["1@60:parity"]),
    "server, trainer adopts": (["cluster.spares=0"], ["1@60:parity"]),
    "trainer, spare takes over": (["cluster.spares=1"], ["4@60:backward"]),
    "server, commit every 8 steps": (["cluster.spares=1", "protection.commit_interval=8"], ["1@60:update"]),
    "two servers at once, m = 2": (["cluster.spares=2", "protection.k=2", "protection.m=2"], ["1@60:parity", "2@60:parity"]),
}
FIELDS = (
    "scenario", "repeat", "gap_ms", "recovery_ms", "redone_steps", "step_ms", "samples_per_second_before",
    "samples_per_second_during", "samples_per_second_after", "rebuild_seconds", "rebuilt_bytes", "on_demand_rows",
    "model_sha256", "ranks", "device", "cores", "torch", "ecrm_commit",
)  # fmt: skip


def prepare(folder: Path, rows: int) -> Path:
    """Generated rows, prepared."""
    text, data = folder / "rows.txt", folder / "data"
    _ecrm("generate", "criteo", "--rows", str(rows), "--seed", "1", "--output", str(text))
    _ecrm("prepare", "criteo", str(text), "--output", str(data))
    return data


def _ecrm(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "ecrm", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"ecrm {' '.join(words)} failed:\n{done.stdout}{done.stderr}")


def measure(name: str, repeat: int, data: Path, folder: Path, steps: int) -> dict[str, object]:
    """One run of a scenario as a row of the CSV."""
    sets, kills = SCENARIOS[name]
    words = ["launch", "quickstart", "--run-dir", str(folder)]
    for one in (f"data.path={data}", f"train.steps={steps}", f"train.global_batch={GLOBAL_BATCH}", "train.log_every_steps=10",
                "model.dense_arch=native", "protection.verify_parity_at_end=true", *sets):  # fmt: skip
        words += ["--set", one]
    for kill in kills:
        words += ["--kill", kill]
    _ecrm(*words)
    record = read_run(folder)
    pace = before_during_after(record, GLOBAL_BATCH)
    failures = record.summary["failures"]
    if len(failures) == 0 or record.summary["parity"]["mismatches"]:
        sys.exit(f"{name}: {len(failures)} failures, parity {record.summary['parity']}: not what was to be measured")
    return {
        "scenario": name,
        "repeat": repeat,
        "gap_ms": round(1000 * sum(failure["stall_seconds"] for failure in failures), 1),
        "recovery_ms": round(1000 * sum(failure["recovery_seconds"] for failure in failures), 1),
        "redone_steps": sum(failure["redone_steps"] for failure in failures),
        "step_ms": round(1000 * record.summary["step_seconds"]["p50"], 1),
        **{f"samples_per_second_{when}": _rounded(pace[when].samples_per_second) for when in ("before", "during", "after")},
        "rebuild_seconds": round(max(failure["rebuild_seconds"] for failure in failures), 3),
        "rebuilt_bytes": sum(failure["rebuilt_bytes"] for failure in failures),
        "on_demand_rows": sum(failure["on_demand_rows"] for failure in failures),
        "model_sha256": record.summary["model_sha256"],
        "ranks": record.summary["world_size"],
        "device": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": version("torch"),
        "ecrm_commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
    }


def _rounded(rate: float | None) -> int | str:
    return "" if rate is None else round(rate)


def table(rows: list[dict[str, object]]) -> str:
    """Medians over the repeats, as Markdown."""
    lines = [
        "| killed | gap ms | of it recovery ms | a step ms | steps redone | samples/s before | during | after | whole again after s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["scenario"] for row in rows):
        mine = [row for row in rows if row["scenario"] == name]

        def middle(field: str, mine: list[dict[str, object]] = mine) -> float | None:
            values = [float(row[field]) for row in mine if row[field] != ""]
            return statistics.median(values) if values else None

        def shown(field: str, digits: int = 0, middle=middle) -> str:
            value = middle(field)
            return "-" if value is None else f"{value:,.{digits}f}"

        lines.append(
            f"| {name} | {shown('gap_ms')} | {shown('recovery_ms')} | {shown('step_ms')} | {shown('redone_steps')} | "
            f"{shown('samples_per_second_before')} | {shown('samples_per_second_during')} | "
            f"{shown('samples_per_second_after')} | {shown('rebuild_seconds', 2)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    names = list(SCENARIOS)[:1] if options.smoke else list(SCENARIOS)
    repeats, steps, size = (1, 80, 20_000) if options.smoke else (options.repeats, 160, 200_000)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        data = prepare(Path(scratch), size)
        for repeat in range(repeats):  # scenarios in turn, so that a slow spell of the machine hits all of them
            for name in names:
                rows.append(measure(name, repeat, data, Path(scratch) / f"{names.index(name)}-{repeat}", steps))
    hashes = {row["model_sha256"] for row in rows}
    if len(hashes) != 1:
        sys.exit(f"the finished models differ: {hashes}")
    target = Path(tempfile.mkdtemp()) / "recovery.csv" if options.smoke else RESULTS
    target.parent.mkdir(exist_ok=True)
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows))
    print(f"one model_sha256 over all {len(rows)} runs: {hashes.pop()}")
    print(f"written to {target}")


if __name__ == "__main__":
    main()

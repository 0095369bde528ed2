"""What scrubbing costs: seconds a step with some rows per step, over steps of the same run without.

Real training under mpirun on generated Criteo rows. The rows per step change from step to step, so
that a slow spell of the machine hits all of them alike. Step times come from events.jsonl. Writes
benchmarks/results/scrub.csv and prints the table. `--smoke` makes one short run to a temporary
file.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lib import tables
from lib.measure import RUN_SECONDS, device, prepare, set_words, target, write_csv

SETS = {
    "train.global_batch": 1024,
    "train.log_every_steps": 10,
    "model.dense_arch": "native",
    "cluster.spares": 0,
    "protection.verify_parity_at_end": True,
}
SMOKE = {
    "train.steps": 24,
    "train.global_batch": 64,
    "model.max_rows_per_table": 500,
    "cluster.layout": "colocated",
    "cluster.servers": 2,
    "cluster.trainers": 1,
    "protection.k": 1,
}
ROWS_PER_STEP = (0, 400, 4_000, 40_000)
WARM_UP = 8
# quickstart: a row of 16 floats, row-wise Adagrad's one, and the one that says updated
RECORD_BYTES = 4 * (16 + 2)
AS_ECRM = "ecrm"


def act_as_ecrm(arguments: list[str]) -> int:
    """The `ecrm` command whose runs take the next of ROWS_PER_STEP in every step.

    It starts its ranks as this program.
    """
    if arguments[0] == "launch":
        import ecrm.launch.launcher as run

        mpirun_line = run.mpirun_line
        run.mpirun_line = lambda config, words, **options: mpirun_line(
            config, [words[0], __file__, AS_ECRM, *words[3:]], **options
        )
    else:
        from ecrm.engine.engine import Engine

        apply, scrubs = Engine.apply, {}

        def apply_and_scrub_so_much(self: Engine, *values: object, **options: object) -> None:
            state = self.state
            scrub = scrubs.setdefault(id(self), state.scrub)
            rows = ROWS_PER_STEP[self.step % len(ROWS_PER_STEP)]
            scrub._rows_per_step = rows
            state.scrub = state.protection._scrub = scrub if rows else None
            try:
                apply(self, *values, **options)
            finally:
                state.scrub = state.protection._scrub = scrub

        Engine.apply = apply_and_scrub_so_much
    from ecrm.cli.commands import main

    return main(arguments)


def bytes_sent(rows_per_step: int, k: int, m: int) -> int:
    """Bytes of records that a server sends per step.

    Every unit of a stripe travels once, except the one at the rank that judges it.
    """
    return _stripes(rows_per_step, k, m) * (k + m - 1) * RECORD_BYTES


def _stripes(rows_per_step: int, k: int, m: int) -> int:
    return max(1, rows_per_step // (k + m)) if rows_per_step else 0


def measure(
    repeat: int, data: Path, folder: Path, sets: dict[str, object]
) -> list[dict[str, object]]:
    """One run as rows of the CSV, one for each number of rows per step."""
    from ecrm.drill.drill_runs import read_run

    words = [
        sys.executable,
        __file__,
        AS_ECRM,
        "launch",
        "quickstart",
        "--run-dir",
        str(folder),
        "--scrub-rows-per-step",
        "1",
    ]
    words += set_words({**SETS, "data.path": str(data), **sets})
    done = subprocess.run(words, capture_output=True, text=True, timeout=RUN_SECONDS)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    record = read_run(folder)
    if record.summary["scrub"]["corruptions"] or record.summary["parity"]["mismatches"]:
        sys.exit(
            f"{record.summary['scrub']}, parity {record.summary['parity']}: "
            "not what was to be measured"
        )
    taken: dict[int, list[float]] = {rows: [] for rows in ROWS_PER_STEP}
    for (_, before), (step, after) in zip(record.finished, record.finished[1:], strict=False):
        if step > WARM_UP:
            taken[ROWS_PER_STEP[(step - 1) % len(ROWS_PER_STEP)]].append(after - before)
    step_ms = {rows: 1000 * statistics.median(seconds) for rows, seconds in taken.items()}
    k, m = record.summary["protection"]["k"], record.summary["protection"]["m"]
    servers = record.start["config"]["cluster"]["servers"]
    held = (
        record.summary["memory_bytes"]["data"] + record.summary["memory_bytes"]["parity"]
    ) // RECORD_BYTES
    rows = []
    for count in ROWS_PER_STEP:
        checked = _stripes(count, k, m) * (k + m) * servers
        rows.append(
            {
                "rows_per_step": count,
                "repeat": repeat,
                "steps": len(taken[count]),
                "step_ms": round(step_ms[count], 2),
                "ratio_to_0": round(step_ms[count] / step_ms[0], 3),
                "rows_checked_per_step": checked,
                "bytes_per_server_and_step": bytes_sent(count, k, m),
                "steps_a_pass": -(-held // checked) if checked else "",
                "model_sha256": record.summary["model_sha256"],
                "ranks": record.summary["world_size"],
                "k": k,
                "m": m,
                **device(),
            }
        )
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Run, write the CSV, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument(
        "--csv", type=Path, help="where to write; default: benchmarks/results/scrub.csv"
    )
    options = parser.parse_args(words)
    repeats, size = (1, 12_000) if options.smoke else (options.repeats, 200_000)
    sets = SMOKE if options.smoke else {"train.steps": 168}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        data = prepare(options.data or Path(scratch), size)
        for repeat in range(repeats):
            rows += measure(repeat, data, Path(scratch) / str(repeat), sets)
    csv = target("scrub.csv", options.csv, options.smoke)
    write_csv(csv, rows)
    print("\n".join(tables.scrub(rows)))
    print(f"written to {csv}")


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_ECRM]:
        sys.exit(act_as_ecrm(sys.argv[2:]))
    main()

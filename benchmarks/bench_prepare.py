"""Times `ecrm prepare criteo` and `ecrm prepare table` on Criteo text beside pyarrow alone.

    python benchmarks/bench_prepare.py            # 500,000 rows, seven rounds; minutes
    python benchmarks/bench_prepare.py --smoke    # seconds; what the tests run
    python benchmarks/bench_prepare.py --checkout DIR   # `prepare criteo` of another checkout, too

Contenders, each with one thread and with a thread for every core:
  prepare criteo    text to the dataset of `ecrm prepare criteo`, with checksums, on disk.
  prepare table     the same text and 26 hashed columns to a table, by a schema.
  pyarrow alone     The floor: pyarrow divides the lines into 13 numbers and 27 texts. No hashing,
                    no logarithms, no files, no numbers of hexadecimal texts.

Every contender runs once per round in a random order, in a process of its own, and imports before
the time begins. Ratios are of one round. CPU time is that of all threads. `rows_per_second` is of
the clock, and falls with the load of the machine. `rows_per_second_of_free_cores` is computed: rows
over the larger of CPU time / threads and CPU time of the main thread, which reads and writes.
Memory and disk may make a run slower than that. Writes benchmarks/results/prepare.csv.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from lib import tables
from lib.measure import device, ecrm, printed, target, write_csv

CHILD = "child"
TABLE_ROWS = 1000
SCHEMA = "\n".join(
    [
        "header = false",
        "[columns]",
        'label = { kind = "label" }',
        *(f'int_{i} = {{ kind = "dense", transform = "log" }}' for i in range(13)),
        *(f'cat_{i} = {{ kind = "categorical", rows = {TABLE_ROWS} }}' for i in range(26)),
    ]
)


def prepare_criteo(text: str, output: Path, threads: int) -> None:
    from ecrm.data.prepare import prepare

    several = {} if threads == 1 and _is_without_threads(prepare) else {"threads": threads}
    prepare([text], str(output), TABLE_ROWS, **several)


def _is_without_threads(prepare: Callable[..., object]) -> bool:
    """Whether `prepare` is that of a checkout without threads."""
    return "threads" not in prepare.__annotations__


def prepare_table(text: str, output: Path, threads: int) -> None:
    from ecrm.data.columns.prepare import prepare_table as prepare
    from ecrm.data.columns.schema import load_schema

    schema = output.parent / "schema.toml"
    schema.write_text(SCHEMA)
    prepare([text], str(output), load_schema(schema), threads=threads)


def pyarrow_alone(text: str, output: Path, threads: int) -> None:
    import pyarrow
    import pyarrow.csv

    pyarrow.set_cpu_count(threads)
    names = [f"column {place}" for place in range(40)]
    numbers = dict.fromkeys(names[1:14], pyarrow.int64())
    reader = pyarrow.csv.open_csv if threads == 1 else pyarrow.csv.read_csv
    found = reader(
        text,
        pyarrow.csv.ReadOptions(use_threads=threads > 1, block_size=4 << 20, column_names=names),
        pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
        pyarrow.csv.ConvertOptions(
            check_utf8=False,
            column_types=dict.fromkeys(names, pyarrow.string()) | numbers,
            strings_can_be_null=True,
        ),
    )
    for _ in found if threads == 1 else ():
        pass


CONTENDERS: dict[str, Callable[[str, Path, int], None]] = {
    "prepare criteo": prepare_criteo,
    "prepare table": prepare_table,
    "pyarrow alone": pyarrow_alone,
}


def act_as_child(name: str, text: str, output: str, threads: str) -> None:
    """Run a contender once on a few rows, then on all, and print its times as JSON."""
    few = Path(output).parent / "few.txt"
    with open(text, "rb") as file:
        few.write_bytes(b"".join(file.readline() for _ in range(100)))
    CONTENDERS[name](str(few), Path(f"{output}-few"), int(threads))
    clocks = (time.perf_counter, time.process_time, time.thread_time)
    before = [clock() for clock in clocks]
    CONTENDERS[name](text, Path(output), int(threads))
    wall, cpu, main = (clock() - start for clock, start in zip(clocks, before))
    print(json.dumps({"wall": wall, "cpu": cpu, "main": main}))


def digest_of(folder: Path) -> str:
    """SHA-256 of the binary files of a prepared folder, "" without a folder."""
    if not folder.exists():
        return ""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.bin")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def main(words: Sequence[str] | None = None) -> None:
    """Run, write the CSV, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--checkout", type=Path, help="another checkout, for its `prepare criteo`")
    parser.add_argument(
        "--csv", type=Path, help="where to write; default: benchmarks/results/prepare.csv"
    )
    options = parser.parse_args(words)
    count, rounds = (2000, 1) if options.smoke else (options.rows, options.rounds)
    threads = sorted({1, len(os.sched_getaffinity(0))})
    here = str(Path(__file__).parents[1])
    cases = [(name, here, number) for name in CONTENDERS for number in threads]
    if options.checkout:
        commit = printed("git", ["git", "-C", str(options.checkout), "describe", "--always"])
        cases.append((f"prepare criteo of {commit.strip()}", str(options.checkout), 1))
    measured: dict[tuple[str, int], list[dict[str, float]]] = {}
    digests: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as made:
        text = Path(made, "rows.txt")
        ecrm("generate", "criteo", "--rows", str(count), "--seed", "1", "--output", str(text))
        size = text.stat().st_size
        for number in range(rounds):
            for name, checkout, used in random.Random(number).sample(cases, len(cases)):
                with tempfile.TemporaryDirectory(dir=made) as scratch:
                    output = Path(scratch, "out")
                    kind = name.split(" of ")[0]
                    child = [sys.executable, __file__, CHILD, kind]
                    child += [str(text), str(output), str(used)]
                    said = json.loads(printed(name, child, PYTHONPATH=checkout).splitlines()[-1])
                    said["load"] = os.getloadavg()[0]
                    measured.setdefault((name, used), []).append(said)
                    digests.setdefault(kind, set()).add(digest_of(output))
    if unequal := [kind for kind, found in digests.items() if len(found) > 1]:
        sys.exit(f"{unequal[0]}: files differ between runs")
    rows = [
        _row(name, used, count, size, found, measured["pyarrow alone", used])
        | {"data_sha256": next(iter(digests[name.split(" of ")[0]]))}
        | {"pyarrow": version("pyarrow"), "numpy": version("numpy"), **device()}
        for (name, used), found in sorted(measured.items())
    ]
    csv = target("prepare.csv", options.csv, options.smoke)
    write_csv(csv, rows)
    print("\n".join(tables.prepare(rows)))
    print(f"written to {csv}")


def _row(
    name: str,
    threads: int,
    count: int,
    size: int,
    found: Sequence[dict[str, float]],
    floor: Sequence[dict[str, float]],
) -> dict[str, object]:
    """A row of the CSV."""

    def spread(values: Sequence[float]) -> list[float]:
        return [float(np.quantile(values, share)) for share in (0.5, 0.2, 0.8)]

    def named(what: str, values: Sequence[float], digits: int) -> dict[str, float]:
        return {
            f"{what}{suffix}": round(value, digits) if digits else round(value)
            for suffix, value in zip(("", "_p20", "_p80"), spread(values))
        }

    free = [count / max(one["cpu"] / threads, one["main"]) for one in found]
    return {
        "contender": name,
        "threads": threads,
        "rows": count,
        "bytes": size,
        "rounds": len(found),
        **named("rows_per_cpu_second", [count / one["cpu"] for one in found], 0),
        **named("cpu_over_floor", [one["cpu"] / its["cpu"] for one, its in zip(found, floor)], 3),
        "main_thread_share": round(statistics.median(o["main"] / o["cpu"] for o in found), 3),
        **named("rows_per_second", [count / one["wall"] for one in found], 0),
        "rows_per_second_of_free_cores": round(statistics.median(free)),
        "load_average": round(statistics.median(one["load"] for one in found), 1),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        act_as_child(*sys.argv[2:])
    else:
        main()

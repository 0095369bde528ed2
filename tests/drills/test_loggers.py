"""Loggers beside a run whose main trainers are killed: each committed step once, as without kills.

The programs of examples/loggers run with the real packages, W&B in offline mode and MLflow with a
file of SQLite. Both packages are large, and no part of `make venv`:

    .venv/bin/pip install wandb mlflow-skinny sqlalchemy alembic
"""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.commands import ecrm
from support.paths import ROOT

STEPS = 60
LAYOUT = ("--servers", "3", "--trainers", "2", "--spares", "2", "-k", "2", "-m", "1")
KILLS = ("3@7:parity", "4@31:update")
"""The main trainer, then the next main trainer."""
LOSS = "train/loss"
Told = list[tuple[int, float]]


def run(folder: Path, logger: str, *words: str, **environment: str) -> str:
    """A run with a logger; returns the model's hash."""
    script = ROOT / "examples" / "how_to" / "schedule.py"
    sets = (f"hooks.logger={json.dumps(logger)}", "train.log_every_steps=1")
    options = [word for each in sets for word in ("--set", each)]
    line = ("launch", str(script), *LAYOUT, "--run-dir", str(folder / "run"), *options, *words)
    done = ecrm(*line, cwd=folder, timeout=200, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hooks.logger" not in done.stderr, (folder / "run" / "hooks.log").read_text()
    return json.loads((folder / "run" / "summary.json").read_text())["model_sha256"]


def from_lines(folder: Path) -> Told:
    lines = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    return [(line["step"], line["values"][LOSS]) for line in lines if LOSS in line["values"]]


def from_mlflow(folder: Path) -> Told:
    asked = "select step, value from metrics where key = ? order by timestamp, step"
    return sqlite3.connect(folder / "mlflow.db").execute(asked, (LOSS,)).fetchall()


def from_wandb(folder: Path) -> Told:
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows = [row for row in history(file.read_bytes()) if LOSS in row]
    return [(int(row["_step"]), row[LOSS]) for row in rows]


def history(data: bytes) -> Iterator[dict[str, float]]:
    """The rows in a file of W&B: records in blocks of 32 KiB, as in a log of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, held, block, full, last = 7, b"", 1 << 15, 1, 4
    while at + 7 <= len(data):
        if (left := block - at % block) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        held += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (full, last):
            record, held = Record.FromString(held), b""
            items = record.history.item
            if items:
                yield {one.key or one.nested_key[0]: json.loads(one.value_json) for one in items}


LOGGERS: dict[str, tuple[str, Callable[[Path], Told]]] = {
    "lines": ("cat > lines.jsonl", from_lines),
    "wandb": (f"{sys.executable} {ROOT}/examples/loggers/to_wandb.py", from_wandb),
    "mlflow": (f"{sys.executable} {ROOT}/examples/loggers/to_mlflow.py", from_mlflow),
}


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> tuple[str, Told]:
    """Hash and lines of the run without kills."""
    folder = tmp_path_factory.mktemp("calm")
    return run(folder, LOGGERS["lines"][0]), from_lines(folder)


@pytest.mark.parametrize("name", LOGGERS)
def test_each_committed_step_is_there_once_though_main_trainers_die(tmp_path, calm, name):
    if name != "lines" and importlib.util.find_spec(name) is None:
        pytest.skip("type .venv/bin/pip install wandb mlflow-skinny sqlalchemy alembic")
    model, wanted = calm
    command, read = LOGGERS[name]
    kills = [word for kill in KILLS for word in ("--kill", kill)]
    environment = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
    }
    assert run(tmp_path, command, *kills, **environment) == model
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    dead = [json.loads(line) for line in events]
    mains = [kill["rank"] for kill in dead if kill["event"] == "kill"]
    assert mains == [3, 4]
    assert [step for step, _ in wanted] == list(range(1, STEPS + 1))
    assert read(tmp_path) == wanted

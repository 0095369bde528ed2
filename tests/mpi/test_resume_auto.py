"""`--resume auto`: the same line starts a run, goes on with it whatever was killed when, and does nothing once it is complete."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ecrm.checkpoint.folder import find
from ecrm.cli.commands import main
from ecrm.process.linux import session_members, shared_segments
from support.drilling import BASE, RUN_SECONDS, Run, launch, launch_words

HALF_WRITTEN = (".*", "checkpoints/.*")


def one_line(folder: Path, data: Path, sets: dict) -> list[str]:
    return [*launch_words(folder, data, sets), "--resume", "auto"]


def life(
    words: list[str], over: Callable[[float], bool] = lambda seconds: False
) -> tuple[int | None, str]:
    """Type the line; SIGKILL everything as soon as it is `over`. Exit code, None when it was killed, and what was printed."""
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    began, code = time.monotonic(), None
    mpirun: set[int] = set()
    while (code := process.poll()) is None and not over(time.monotonic() - began):
        assert time.monotonic() - began < RUN_SECONDS
        time.sleep(0.002)
    with contextlib.suppress(OSError):
        mpirun.update(
            map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        )
    segments: set[str] = set()
    while left := [pid for leader in (process.pid, *mpirun) for pid in session_members(leader)]:
        for pid in left:
            segments |= shared_segments(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for segment in segments:
        Path(segment).unlink(missing_ok=True)
    return code, process.communicate()[0]


def half_written(folder: Path) -> list[str]:
    return [path.name for pattern in HALF_WRITTEN for path in folder.glob(pattern)]


def test_one_line_survives_sigkill_of_everything_and_ends_in_the_undisturbed_model(
    tmp_path, criteo_rows, undisturbed
):
    folder, sets = tmp_path / "run", {**BASE, "checkpoint.every_steps": 10}
    words = one_line(folder, criteo_rows, sets)
    code, output = life(words, lambda _: bool(find(folder / "checkpoints")[0]))
    assert code is None, output
    (folder / ".ranks.json.1").write_text("half")
    with open(folder / "events.jsonl", "a") as events:
        events.write('{"event": "prog')
    code, output = life(words)
    assert code == 0, output
    run = Run(code, output, folder)
    assert run.model == undisturbed and not half_written(folder)
    starts = run.events_of("start")
    assert (
        len(starts) == 2 and starts[1]["before"] == "killed" and starts[1]["resumed"]["step"] >= 10
    )
    first, second = run.summary["lives"]
    assert (first["from_step"], first["ended"], second["ended"], second["seen_step"]) == (
        0,
        "killed",
        "complete",
        40,
    )
    assert second["from_step"] == starts[1]["resumed"]["step"]
    before = (folder / "events.jsonl").read_bytes()
    as_rank = {**os.environ, "OMPI_COMM_WORLD_SIZE": "6", "OMPI_MCA_mpi_ft_enable": "1"}
    for command in (words, [*words[:3], "train", *words[4:]]):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_SECONDS, env=as_rank
        )
        assert (
            done.returncode == 0
            and done.stdout + done.stderr
            == f"{folder} holds the complete run: nothing is left to do\n"
        )
    assert (folder / "events.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "train.seed=8",
            "holds a run with train.seed 7, here train.seed is 8: name a new folder, and type --resume",
        ),
        ("train.steps=41", "train.steps 40, here train.steps is 41"),
        ("train.sparse_lr=0.01", "train.sparse_lr 0.05"),
        ("data.eval_fraction=0.2", "data.eval_fraction 0.1"),
        ("model.max_rows_per_table=999", "tables other ones, here tables is these"),
    ],
)
@pytest.mark.parametrize("gone", [(), ("summary.json", "checkpoints")], ids=["complete", "begun"])
def test_the_folder_of_another_run_is_refused(
    tmp_path, criteo_rows, undisturbed_run, capsys, change, said, gone
):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed_run.folder, folder)
    for name in gone:
        shutil.rmtree(folder / name) if name == "checkpoints" else (folder / name).unlink()
    assert main([*one_line(folder, criteo_rows, BASE)[3:], "--set", change]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error and str(folder) in error


def test_what_is_no_run_folder_and_what_is_not_to_be_trusted_is_refused(
    tmp_path, criteo_rows, capsys
):
    words = one_line(tmp_path, criteo_rows, BASE)[3:]
    (tmp_path / "notes.txt").write_text("mine")
    assert main(words) == 2 and "neither empty nor the folder of a run" in capsys.readouterr().err
    (tmp_path / "notes.txt").unlink()
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\n')
    (tmp_path / "rejected.json").write_text("{}")
    assert main(words) == 2 and "parity did not match" in capsys.readouterr().err
    del words[words.index("--run-dir") : words.index("--run-dir") + 2]
    assert main(words) == 2 and "type --run-dir DIR" in capsys.readouterr().err


def there(pattern: str) -> Callable[[Path], Callable[[float], bool]]:
    """Over as soon as there is such a file."""
    return lambda folder: lambda seconds: any(True for _ in folder.glob(pattern))


def after(seconds: float) -> Callable[[Path], Callable[[float], bool]]:
    return lambda folder: lambda gone: gone >= seconds


KILLS = [
    after(0.1),
    after(0.5),
    after(1.2),
    there("lock"),
    after(1.7),
    there("ranks.json"),
    there("events.jsonl"),
    after(2.3),
    there("checkpoints/.step-*"),
    after(2.7),
    there("checkpoints/.step-*/dense.bin"),
    after(3.1),
    there("checkpoints/step-*/.manifest.json"),
    after(3.6),
    after(4.2),
    there("checkpoints/step-00000400"),
    there(".summary.json*"),
]
"""When everything is killed: in seconds from typing the line, or as soon as a file is there."""


@pytest.mark.drill
@pytest.mark.parametrize(
    "sets",
    [
        {"checkpoint.every_steps": 20},
        {
            "checkpoint.every_steps": 10,
            "checkpoint.mode": "async",
            "checkpoint.kind": "incremental",
            "checkpoint.full_every": 3,
        },
        {},
        {"protection.name": "mapped", "protection.verify_parity_at_end": False},
    ],
    ids=["sync", "async", "end", "mapped"],
)
def test_one_line_killed_at_every_instant_ends_in_the_undisturbed_model(
    tmp_path, criteo_rows, sets
):
    long = {**BASE, "train.steps": 400}
    folder, expected = tmp_path / "run", launch(tmp_path / "undisturbed", criteo_rows, long).model
    words, killed = one_line(folder, criteo_rows, {**long, **sets}), 0
    for kill in KILLS:
        code, output = life(words, kill(folder))
        assert code in (None, 0), output
        if code == 0:
            break
        killed += 1
    code, output = life(words)
    assert code == 0, output
    run = Run(code, output, folder)
    print(f"{killed} kills, {len(run.summary['lives'])} lives: {run.summary['lives']}")
    assert killed >= 9 and run.model == expected and not half_written(folder)
    assert len(run.summary["lives"]) == len(run.events_of("start"))
    assert [json.loads(line)["time"] for line in (folder / "events.jsonl").read_text().splitlines()]

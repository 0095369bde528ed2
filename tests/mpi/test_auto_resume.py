"""`--resume auto`: one command starts a run, resumes it after any kill, and ends when complete."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from ecrm.checkpoint.folder import find
from ecrm.cli.commands import main
from support.drilling import BASE, RUN_SECONDS, Run
from support.lives import half_written, life, one_line


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
            == f"{folder} holds the complete run of 40 steps: nothing is left to do; to train more "
            f"steps, type --resume {folder} --run-dir NEW\n"
        )
    assert (folder / "events.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "train.seed=8",
            "holds a run with train.seed 7, here train.seed is 8: name a new folder, and type "
            "--resume",
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
    (tmp_path / "events.jsonl").write_text('{"time": 1.0, "event": "start"}\n')
    (tmp_path / "rejected.json").write_text("{}")
    assert main(words) == 2 and "parity did not match" in capsys.readouterr().err
    del words[words.index("--run-dir") : words.index("--run-dir") + 2]
    assert main(words) == 2 and "type --run-dir DIR" in capsys.readouterr().err

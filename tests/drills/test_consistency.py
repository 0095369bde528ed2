"""A rank with other data or another config ends a real run on all ranks."""

from __future__ import annotations

import json
import subprocess
import sys

from support.drilling import RUN_SECONDS
from support.paths import PROGRAMS

MISBEHAVING = str(PROGRAMS / "misbehaving.py")


def test_a_rank_with_other_data_or_config_ends_the_run_on_all_ranks(tmp_path, criteo_rows):
    other = tmp_path / "other"
    other.mkdir()
    for file in criteo_rows.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    same, different = (f"set data.path={path}:2" for path in (tmp_path / "same", other))
    (tmp_path / "same").symlink_to(criteo_rows)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["files"]["sparse.bin"]["sha256"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(manifest))
    for how, said in (
        ("set train.seed=99:1", "another config (train.seed)"),
        (different, "other data"),
        (same, None),
    ):
        words = [
            sys.executable,
            MISBEHAVING,
            how,
            "launch",
            "tiny",
            "--run-dir",
            str(tmp_path / "run"),
        ]
        sets = (
            "cluster.layout=colocated",
            "cluster.servers=3",
            "cluster.trainers=1",
            "cluster.spares=0",
            "protection.k=2",
            "train.steps=5",
        )
        for one in (f"data.path={criteo_rows}", *sets):
            words += ["--set", one]
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_SECONDS
        )
        if said is None:
            assert done.returncode == 0, done.stdout
            continue
        assert done.returncode == 2, done.stdout
        (error,) = [line for line in done.stdout.splitlines() if line.startswith("ecrm: error: ")]
        assert f"rank {how[-1]} on " in error and f" has {said}: " in error
        assert not (tmp_path / "run").exists()

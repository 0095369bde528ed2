"""Mapped files under real mpirun."""

from __future__ import annotations

from ecrm.cli.commands import main


def test_what_cannot_be_gone_on_from_is_told_before_anything_starts(tmp_path, criteo_rows, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    common = [
        "launch",
        "tiny",
        "--set",
        f"data.path={criteo_rows}",
        "--set",
        "protection.name=mapped",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    for words, said in (
        (
            ["--set", f"mapped.path={tmp_path}/full"],
            "full: not an empty folder: name one that is new or empty",
        ),
        (["--resume", str(tmp_path / "nothing")], "holds no mapped files"),
        (["--set", "mapped.flush=now"], 'mapped.flush is "now": must be one of none, commit'),
    ):
        assert main([*common, *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and said in error, error
    assert not (tmp_path / "run").exists()

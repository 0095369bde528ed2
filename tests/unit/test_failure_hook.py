"""The command of `hooks.on_failure`: once for each failure, bounded in time, with a log."""

from __future__ import annotations

import os
import time

import pytest

from ecrm.launch.failure_hook import LOG, FailureHook

FAILURE = {"event": "failure", "ranks": [3], "step": 7}


def run(folder, command: str, *events: dict, seconds: float = 10.0) -> str:
    """The log after these events."""
    hook = FailureHook(command, seconds, folder)
    hook.take(events)
    hook.close()
    return (folder / LOG).read_text() if (folder / LOG).exists() else ""


def test_the_command_runs_for_each_failure_with_the_event(tmp_path, capsys):
    log = run(
        tmp_path,
        'echo "$ECRM_RUN_DIR has $ECRM_EVENT"',
        {"event": "progress", "step": 1},
        FAILURE,
        {**FAILURE, "ranks": [4]},
    )
    assert log.count(f'{tmp_path} has {{"event": "failure"') == 2
    assert log.index('"ranks": [3]') < log.index('"ranks": [4]')
    assert log.count("exit code 0") == 2 and capsys.readouterr().err == ""


def test_without_a_failure_no_command_runs(tmp_path):
    assert run(tmp_path, "echo never", {"event": "progress", "step": 1}) == ""


def test_a_failed_command_costs_a_line(tmp_path, capsys):
    assert "exit code 3" in run(tmp_path, "echo why >&2; exit 3", FAILURE)
    said = capsys.readouterr().err
    assert said == (f"ecrm: warning: hooks.on_failure ended with 3; see {tmp_path / LOG}\n")
    assert "why" in (tmp_path / LOG).read_text()


def test_a_long_command_is_killed_with_its_children(tmp_path, capsys):
    began = time.monotonic()
    log = run(tmp_path, "sleep 60 & echo $!; wait", FAILURE, seconds=0.5)
    assert time.monotonic() - began < 10
    child = int(log.splitlines()[1])
    for _ in range(50):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert "took more than 0.5 s: killed" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path, capsys):
    run(tmp_path / "absent", "true", FAILURE)
    assert "cannot run: No such file" in capsys.readouterr().err

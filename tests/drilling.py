"""Real runs for tests: `ecrm launch` under mpirun, real SIGKILL, and what the run folder says afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN_SECONDS = 300
"""After which a run counts as hanging, on a machine that may have other work."""


@dataclass(frozen=True)
class Run:
    """A finished `ecrm launch`: exit code, what it printed, and its run folder."""

    code: int
    output: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        path = self.folder / "summary.json"
        assert path.exists(), f"no summary.json:\n{self.output}"
        return json.loads(path.read_text())

    @property
    def model(self) -> str:
        return self.summary["model_sha256"]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return json.loads((self.folder / "ranks.json").read_text())["ranks"]

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def launch(
    folder: Path, data: Path, sets: dict[str, Any] | None = None, kills: tuple[str, ...] = (), config: str = "tiny"
) -> Run:
    """Run to the end, bounded in time; nothing of the run is left alive."""
    words = [sys.executable, "-m", "ecrm", "launch", config, "--run-dir", str(folder), "--set", f"data.path={data}"]
    for key, value in (sets or {}).items():
        words += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    for kill in kills:
        words += ["--kill", kill]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"not finished after {RUN_SECONDS} s: {' '.join(words)}\n{output}") from None
    return Run(process.returncode, output, folder)


def drill(folder: Path, data: Path, sets: dict[str, Any] | None = None, kills: tuple[str, ...] = ()) -> Run:
    """A run that must complete, with every scheduled kill fired, recovered, and parity right at the end."""
    run = launch(folder, data, {"protection.verify_parity_at_end": True, **(sets or {})}, kills)
    assert run.code == 0, run.output
    fired = {event["scheduled"] for event in run.events_of("kill")}
    assert fired == {kill if ":" in kill else f"{kill}:input" for kill in kills}, run.output
    dead = {rank for failure in run.summary["failures"] for rank in failure["ranks"]}
    assert dead == {int(kill.partition("@")[0]) for kill in kills}, run.output
    assert run.summary["parity"]["mismatches"] == 0, run.output
    assert run.summary["parity"]["stripes"] > 0 or run.summary["protection"]["m"] == 0, run.output
    return run


def is_running(pid: int) -> bool:
    """Whether a process is there and not just a zombie that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

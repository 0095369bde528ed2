"""Runs on imitated hosts, and the loss of one of them."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ecrm.run.reading import EventTail
from support.drilling import LONG, RUN_SECONDS, Run
from support.imitated_hosts import ImitatedHosts
from support.paths import PROGRAMS
from support.slurm_cluster import SlurmCluster
from support.ssh_servers import serve

KEEP_ALIVE = 2.0

# Two ranks a host.
ONE_LOST = {
    "cluster.failure_domain": "host",
    "cluster.servers": 3,
    "cluster.trainers": 2,
    "cluster.spares": 1,
}

SRUN = "srun --overlap --no-kill --nodes=1 --ntasks=1 --nodelist={host}"
STARTER = f"{sys.executable} {PROGRAMS / 'imitated_ssh.py'} {{host}} {{private}} {{command}}"


@dataclass
class Training:
    """A run on imitated hosts, with its events as they come; `type_it` types its line."""

    hosts: ImitatedHosts
    process: subprocess.Popen
    folder: Path
    type_it: Callable[[], subprocess.Popen]

    def __post_init__(self) -> None:
        self._tail = EventTail(self.folder / "events.jsonl")
        self.events: list[dict] = []

    def wait_for(self, wanted: Callable[[dict], bool]) -> dict:
        """The first event that is wanted, whether it has come already or not."""
        deadline = time.monotonic() + RUN_SECONDS
        seen = 0
        while time.monotonic() < deadline:
            self.events += self._tail.new_events()
            for event in self.events[seen:]:
                if wanted(event):
                    return event
            seen = len(self.events)
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError(f"it never happened\n{self.finish().output}")

    def wait_for_step(self, step: int) -> None:
        """Until a progress line has that step."""
        self.wait_for(lambda event: event["event"] == "progress" and event["step"] >= step)

    def ranks_of(self, name: str) -> list[int]:
        """The ranks on a host, as ranks.json says."""
        content = Run(0, "", self.folder).ranks
        return [entry["rank"] for entry in content if entry["host"] == self.hosts.namespace(name)]

    def wait_until_empty(self, name: str, seconds: float) -> float:
        """Until no process runs on a host; returns the time at which that was seen."""
        deadline = time.monotonic() + seconds
        while self.hosts.pids(name):
            assert time.monotonic() < deadline, (
                f"after {seconds} s there still runs {self.hosts.pids(name)} on {name}"
            )
            time.sleep(0.01)
        return time.time()

    def finish(self) -> Run:
        """The finished run; nothing is left on any host."""
        try:
            output, _ = self.process.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
            raise AssertionError(f"not finished after {RUN_SECONDS} s\n{output}") from None
        for name in self.hosts.names:
            self.wait_until_empty(name, 2 * KEEP_ALIVE)  # sshd and slurmstepd have their own pace
        return Run(self.process.returncode, output, self.folder)

    def type_again(self) -> None:
        """The same line once more, now that the run has ended."""
        assert self.process.poll() is not None
        self.process = self.type_it()

    def end(self) -> None:
        """Whatever became of the test: the run is over."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.communicate(timeout=RUN_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()


AGAIN = 'until "$@"; do code=$?; case $code in 1 | 3) ;; *) exit $code ;; esac; done'
LOOP = ("sh", "-c", AGAIN, "-")
"""The line is typed again after an exit code of which deploy/ecrm.sbatch makes a new start."""


@contextmanager
def trainings(tmp_path: Path, data: Path) -> Iterator[Callable[..., Training]]:
    """Starts training on so many imitated hosts, and ends it in the end.

    They train the tiny config, or a `script` with its arguments. Hosts are reached `by` real ssh,
    or Slurm in an allocation, or by default an imitation of ssh. `bad` cables lose and delay. With
    a `rate`, megabits a second, cables are slow. A `loop` of a shell types the line again.
    With `listed` so many hosts are in the hosts file, and others may join.
    """
    all_trainings, all_hosts, clusters = [], [], []

    def start(
        count: int,
        sets: dict,
        *words: str,
        starter: str = STARTER,
        slots: int = 2,
        by: str = "",
        script: tuple[str, ...] = (),
        bad: tuple[float, float, float] | None = None,
        rate: float = 0.0,
        loop: bool = False,
        listed: int | None = None,
    ) -> Training:
        hosts = ImitatedHosts(count, bad, rate)
        all_hosts.append(hosts)
        hosts.__enter__()
        private, file, folder = tmp_path / "private", tmp_path / "hosts", tmp_path / "run"
        private.mkdir()
        # The folder of mpirun's session files is one that the hosts do not have.
        environment, allocation = {**os.environ, "TMPDIR": str(private)}, []
        if by == "ssh":
            starter = serve(hosts, tmp_path / "ssh", private)
        if by == "slurm":
            clusters.append(SlurmCluster(hosts, tmp_path / "slurm", private))
            environment.update(clusters[-1].variables)
            starter, allocation = SRUN, ["salloc", f"--nodes={count}", "--no-kill", "--quiet"]
        named = [
            f"{hosts.namespace(name)} "
            f"slots={slots}{f' address={hosts.address(name)}' if by else ''}\n"
            for name in hosts.names[:listed]
        ]
        file.write_text("# imitated\n" + "".join(named))
        line = [
            *allocation,
            sys.executable,
            "-m",
            "ecrm",
            "launch",
            script[0] if script else "tiny",
            "--run-dir",
            str(folder),
        ]
        line += [
            "--hosts",
            str(file),
            "--interface",
            hosts.bridge,
            "--keep-alive",
            str(KEEP_ALIVE),
            *words,
        ]
        line += ["--starter", starter.replace("{private}", str(private))]
        built_in = {} if script else {"data.path": data, **LONG}
        for key, value in {**built_in, **sets}.items():
            line += ["--set", f"{key}={value}"]
        line += ["--", *script[1:]] if script else []
        line = [*LOOP, *line] if loop else line

        def type_it() -> subprocess.Popen:
            return subprocess.Popen(
                line,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                start_new_session=True,
                cwd=tmp_path if script else None,  # an example leaves its model there
            )

        all_trainings.append(Training(hosts, type_it(), folder, type_it))
        return all_trainings[-1]

    yield start
    for training in all_trainings:
        training.end()
    for cluster in clusters:
        cluster.end()
    for hosts in all_hosts:
        hosts.__exit__()


def lose(training: Training, name: str) -> float:
    """Power and network of a host gone at once; returns when."""
    training.hosts.cut(name)
    when = time.time()
    training.hosts.kill(name)
    return when


def check(run: Run, model: str, lost: list[list[int]]) -> None:
    """The run is complete, lost exactly these ranks by host, and has the undisturbed model."""
    assert run.code == 0, run.output
    assert run.model == model, run.output
    dead = [sorted(failure["ranks"]) for failure in run.summary["failures"]]
    assert sorted(rank for ranks in dead for rank in ranks) == sorted(
        rank for ranks in lost for rank in ranks
    ), run.output
    assert run.summary["parity"]["mismatches"] == 0


def gaps(run: Run, losses: list[float]) -> list[float]:
    """Seconds between the steps before and after each loss; asserts that they are short enough."""
    finished = sorted(at for event in run.events_of("progress") for _, at in event["finished"])
    steps = [after - before for before, after in zip(finished, finished[1:])]
    usual = sorted(steps)[: -3 * len(losses)]  # all but the gaps, and what rebuilding begins with
    found = []
    for loss in losses:
        before, after = (
            max(at for at in finished if at <= loss),
            min(at for at in finished if at > loss),
        )
        # A step may finish after the loss: then the gap begins there.
        while after - loss < KEEP_ALIVE / 2:
            before, after = after, min(at for at in finished if at > after)
        found.append(after - before)
        said = (
            f"gap {after - before:.3f} s, step {statistics.median(usual) * 1000:.0f} ms "
            f"(longest {usual[-1] * 1000:.0f})"
        )
        print(said)
        assert after - loss <= KEEP_ALIVE + 2 * usual[-1], f"{said}\n{run.output}"
    return found


def survives_the_loss(training: Training, name: str, ranks: list[int], model: str) -> None:
    """A host with these ranks is lost in step 30 or soon after.

    The run goes on to the same model.
    """
    training.wait_for_step(30)
    assert training.ranks_of(name) == ranks
    when = lose(training, name)
    run = training.finish()
    check(run, model, [ranks])
    gaps(run, [when])

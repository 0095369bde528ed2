"""A real Slurm cluster: munged and slurmctld on the head machine, slurmd on imitated hosts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from support.imitated_hosts import ImitatedHosts

SECONDS = 30
PORT = 12_000 + os.getpid() % 20_000  # below those that the system gives out
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "salloc", "srun", "sinfo")
CONFIG = """
ClusterName=ecrm
SlurmctldHost=head({head})
SlurmctldPort={port}
SlurmdPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""

# slurmd wants some, whatever it is to do with them.
CGROUPS = (
    "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/freezer "
    "&& mount -t cgroup -o freezer none /sys/fs/cgroup/freezer"
)


def why_no_slurm() -> str | None:
    """What is missing; None if nothing is."""
    for program in PROGRAMS:
        if shutil.which(program, path=PATH) is None:
            return f"no program {program} (Debian: apt install slurmd slurmctld slurm-client munge)"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", CGROUPS], capture_output=True, text=True, timeout=SECONDS
    )
    return f"no control groups for slurmd: {done.stderr.strip()}" if done.returncode else None


class SlurmCluster:
    """Started with its hosts as nodes, where nothing of `private` is seen.

    `variables` are those of the environment that its commands need.

    slurmd is left out of what `hosts.pids` tells, and killed with its host.
    """

    def __init__(self, hosts: ImitatedHosts, folder: Path, private: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen] = []
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        try:
            self._start(hosts, folder, private)
        except BaseException:
            self.end()
            raise

    def _start(self, hosts: ImitatedHosts, folder: Path, private: Path) -> None:
        (folder / "state").mkdir(parents=True)
        nodes = [
            f"NodeName={hosts.namespace(name)} NodeAddr={hosts.address(name)} CPUs=8 State=UNKNOWN"
            for name in hosts.names
        ]
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "slurm.conf").write_text(
            CONFIG.format(head=hosts.head, port=PORT, folder=folder, nodes="\n".join(nodes))
        )
        self._run("mungekey", "--create", f"--keyfile={folder}/munge.key")
        self._begin(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munge.pid",
            f"--log-file={folder}/munge.log",
            f"--seed-file={folder}/munge.seed",
        )
        self._until(lambda: (folder / "munge.socket").exists(), "munge.log")
        self._begin("unshare", "--uts", "sh", "-c", "hostname head && exec slurmctld -D")
        for name in hosts.names:
            inside = (
                f"hostname {hosts.namespace(name)} && mount -t tmpfs none {private} "
                f"&& mount -t tmpfs none /dev/shm && {CGROUPS} && exec slurmd -D"
            )
            (folder / f"spool-{hosts.namespace(name)}").mkdir()
            slurmd = self._begin(
                "ip",
                "netns",
                "exec",
                hosts.namespace(name),
                "unshare",
                "--uts",
                "--mount",
                "sh",
                "-c",
                inside,
            )
            hosts.daemons.add(slurmd.pid)
        self._until(
            lambda: (
                self._run("sinfo", "--noheader", "--format=%D %t").split()
                == [str(len(hosts.names)), "idle"]
            ),
            "slurmctld.log",
        )

    def end(self) -> None:
        """SIGKILL its daemons."""
        for daemon in self._daemons:
            daemon.send_signal(signal.SIGKILL)
            daemon.wait(SECONDS)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": PATH, **self.variables}

    def _run(self, *words: str) -> str:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=SECONDS, env=self._environment()
        ).stdout

    def _begin(self, *words: str) -> subprocess.Popen:
        with open(self._folder / "output", "a") as output:
            self._daemons.append(
                subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env=self._environment(),
                )
            )
        return self._daemons[-1]

    def _until(self, holds, log: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not holds():
            said = "\n".join(
                file.read_text()[-2000:]
                for file in (self._folder / "output", self._folder / log)
                if file.exists()
            )
            assert time.monotonic() < deadline, said
            time.sleep(0.2)

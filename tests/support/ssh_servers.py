"""Real sshd on every imitated host, and the starter that reaches them with real ssh."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

from ecrm.launch.remote_host import DEFAULT_STARTER
from support.imitated_hosts import ImitatedHosts

SECONDS = 20
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
SERVER = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
PasswordAuthentication no
PermitRootLogin yes
StrictModes no
UsePAM no
MaxStartups 10
"""
CLIENT = """
IdentityFile {folder}/user
UserKnownHostsFile {folder}/known
StrictHostKeyChecking no
LogLevel ERROR
"""


def why_no_ssh() -> str | None:
    """What is missing; None if nothing is."""
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"no program {program}"
    return None if SSHD else "no program sshd (Debian: apt install openssh-server)"


def serve(hosts: ImitatedHosts, folder: Path, private: Path) -> str:
    """Start sshd on every host, with keys in `folder`, where nothing of `private` is seen.

    Returns the default starter, with these keys.

    It is left out of what `hosts.pids` tells, and killed with its host.
    """
    folder.mkdir()
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)],
            check=True,
            timeout=SECONDS,
        )
    (folder / "server").write_text(SERVER.format(folder=folder))
    (folder / "client").write_text(CLIENT.format(folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in hosts.names:
        inside = (
            f"hostname {hosts.namespace(name)} && mount -t tmpfs none {private} "
            "&& mount -t tmpfs none /dev/shm "
            f"&& exec {SSHD} -D -e -f {folder}/server"
        )
        with open(folder / f"{name}.log", "w") as log:
            server = subprocess.Popen(
                [
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
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            )
        hosts.daemons.add(server.pid)
    for name in hosts.names:
        _wait_for(hosts.address(name), folder / f"{name}.log")
    return DEFAULT_STARTER.replace("ssh ", f"ssh -F {folder}/client ", 1)


def _wait_for(address: str, log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            socket.create_connection((address, 22), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

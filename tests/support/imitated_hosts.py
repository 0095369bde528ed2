"""Imitated hosts: network namespaces with virtual cables to a bridge on the head machine."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ecrm.launch.network import local_networks
from support.paths import PROGRAMS

SECONDS = 20


class ImitatedHosts:
    """Hosts h1 to hN; names of their namespaces and devices are used by no other process.

    With `bad`, (share lost, milliseconds of delay, of jitter), the cable of each host is a process
    (support/programs/cable.cpp): kernels need not have netem. So with a `rate`, megabits a second
    each way.
    """

    def __init__(
        self, count: int, bad: tuple[float, float, float] | None = None, rate: float = 0.0
    ) -> None:
        self._bad, self._rate = (bad or (0.0, 0.0, 0.0)) if bad or rate else None, rate
        self._relays: list[subprocess.Popen[str]] = []
        self.names = [f"h{number}" for number in range(1, count + 1)]
        self.bridge = f"eb{os.getpid()}"
        self.subnet = _free_subnet()
        self.daemons: set[int] = set()  # processes that belong to a host, whatever runs on it

    def __enter__(self) -> ImitatedHosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.SubprocessError):
                self.kill(name)
            _ip("netns", "delete", self.namespace(name), check=False)
            _ip("link", "delete", self._cable(name), check=False)
        for relay in self._relays:
            relay.kill()
            relay.communicate()
        _ip("link", "delete", self.bridge, check=False)

    def namespace(self, name: str) -> str:
        """The network namespace of a host."""
        return f"ecrm-{os.getpid()}-{name}"

    @property
    def head(self) -> str:
        """The address of the head machine."""
        return str(next(self.subnet.hosts()))

    def address(self, name: str) -> str:
        """The address of a host."""
        return str(list(self.subnet.hosts())[1 + self.names.index(name)])

    def pids(self, name: str) -> set[int]:
        """The processes that run on a host, its daemons left out."""
        return self._all_pids(name) - self.daemons

    def _all_pids(self, name: str) -> set[int]:
        return {
            int(word) for word in _ip("netns", "pids", self.namespace(name), check=False).split()
        }

    def kill(self, name: str) -> None:
        """SIGKILL all that runs on a host, until nothing does."""
        deadline = time.monotonic() + SECONDS
        while (pids := self._all_pids(name)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def cut(self, name: str) -> None:
        """Pull a host's cable out."""
        _ip("link", "set", self._cable(name), "down")

    def mend(self, name: str) -> None:
        """Put it in again."""
        _ip("link", "set", self._cable(name), "up")

    def mute(self, name: str) -> None:
        """Cut a cable one way: the head machine no longer hears the host; other hosts do."""
        _ip(
            "-n",
            self.namespace(name),
            "route",
            "add",
            "blackhole",
            f"{next(self.subnet.hosts())}/32",
        )

    def deafen(self, name: str, other: str) -> None:
        """What a host sends to another one is lost on the way; all others hear both."""
        nobody = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
        _ip("-n", self.namespace(name), "neighbour", "replace", self.address(other), *nobody)

    def part(self, name: str, other: str) -> None:
        """Two hosts do not hear each other any more; the head machine hears both."""
        self.deafen(name, other)
        self.deafen(other, name)

    def join(self, name: str, other: str) -> None:
        """The two hosts of `part` hear each other again."""
        for one, two in ((name, other), (other, name)):
            _ip("-n", self.namespace(one), "neighbour", "delete", self.address(two), "dev", "eth0")

    def ports(self, name: str) -> set[tuple[str, int]]:
        """The addresses and ports at which processes of a host listen by TCP."""
        lines = _ip("netns", "exec", self.namespace(name), "ss", "-tnlH").splitlines()
        ends = (line.split()[3].rpartition(":") for line in lines)
        return {(address, int(port)) for address, _, port in ends}

    def reset(self, name: str, other: str, every: bool = False) -> int:
        """Reset a TCP connection between processes of two hosts, or every one; returns how many.

        `other` may be "head", the head machine.

        0 also for a kernel that does not do this (CONFIG_INET_DIAG_DESTROY).
        """
        ss = ("netns", "exec", self.namespace(name), "ss", "-tnH")
        to_other = ("dst", self.head if other == "head" else self.address(other))
        lines = _ip(*ss, "state", "established", *to_other).splitlines()
        random.shuffle(lines)
        done = 0
        for line in lines if every else lines[:1]:
            here, there = (end.rpartition(":")[2] for end in line.split()[2:4])
            words = ("--kill", *to_other, "sport", "=", f":{here}", "dport", "=", f":{there}")
            done += bool(_ip(*ss, *words))
        return done

    def frames(self) -> tuple[int, int]:
        """How many frames the cables of `bad` have lost, and how many waited for the `rate`."""
        lost = waited = 0
        for relay in self._relays:
            relay.send_signal(signal.SIGUSR1)
            assert relay.stdout is not None
            of_one = relay.stdout.readline().split()
            lost, waited = lost + int(of_one[0]), waited + int(of_one[1])
        return lost, waited

    def _cable(self, name: str) -> str:
        return f"ec{os.getpid()}{name}"

    def _relay(self, name: str, bad: tuple[float, float, float]) -> None:
        """A cable that loses and delays; its far end is eth0 of the host."""
        far = f"ef{os.getpid()}{name}"
        words = [cable_program(), far, self._cable(name), *map(str, bad), str(self._rate)]
        relay = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self._relays.append(relay)
        assert relay.stdout is not None and relay.stdout.readline() == "ready\n"
        if self._rate:  # fewer frames: the process has to carry each
            for end in (far, self._cable(name)):
                _ip("link", "set", end, "mtu", "9000")
        _ip("link", "set", far, "netns", self.namespace(name))
        _ip("-n", self.namespace(name), "link", "set", far, "name", "eth0")

    def _make(self) -> None:
        head, *addresses = list(self.subnet.hosts())[: len(self.names) + 1]
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("address", "add", f"{head}/{self.subnet.prefixlen}", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        for name, address in zip(self.names, addresses):
            inside = ("-n", self.namespace(name))
            _ip("netns", "add", self.namespace(name))
            if self._bad is None:
                peer = ("peer", "name", "eth0", "netns", self.namespace(name))
                _ip("link", "add", self._cable(name), "type", "veth", *peer)
            else:
                self._relay(name, self._bad)
            _ip("link", "set", self._cable(name), "master", self.bridge, "up")
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "address", "add", f"{address}/{self.subnet.prefixlen}", "dev", "eth0")
            _ip(*inside, "link", "set", "eth0", "up")


def cable_program() -> Path:
    """support/programs/cable.cpp, compiled."""
    program = Path(tempfile.gettempdir(), f"ecrm-cable-{os.getpid()}")
    if not program.exists():
        source = PROGRAMS / "cable.cpp"
        subprocess.run(["g++", "-O2", "-std=c++17", "-o", program, source], check=True)
        atexit.register(program.unlink)
    return program


def why_not() -> str | None:
    """Why hosts cannot be imitated here; None if they can."""
    for program in ("ip", "unshare", "mount", "hostname"):
        if shutil.which(program) is None:
            return f"no program {program}"
    try:
        with ImitatedHosts(1) as hosts:
            subprocess.run(
                [
                    "ip",
                    "netns",
                    "exec",
                    hosts.namespace("h1"),
                    "unshare",
                    "--uts",
                    "--mount",
                    "--pid",
                    "--fork",
                    "--mount-proc",
                    "true",
                ],
                check=True,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {' '.join(error.cmd)}: {error.stderr.strip()}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no network namespaces: {error}"
    return None


@contextlib.contextmanager
def imitated(count: int) -> Iterator[ImitatedHosts]:
    """Hosts that are gone afterwards, whatever happened."""
    with ImitatedHosts(count) as hosts:
        yield hosts


def _free_subnet() -> ipaddress.IPv4Network:
    """A /24 of 198.18.0.0/15, which is kept for tests, that this machine does not use."""
    used = {network.subnet for network in local_networks()}
    subnets = list(ipaddress.IPv4Network("198.18.0.0/15").subnets(new_prefix=24))
    start = os.getpid() % len(subnets)
    return next(
        subnet
        for subnet in [*subnets[start:], *subnets[:start]]
        if not any(map(subnet.overlaps, used))
    )


def _ip(*words: str, check: bool = True) -> str:
    command: Sequence[str] = ["ip", *words]
    return subprocess.run(
        command, check=check, capture_output=True, text=True, timeout=SECONDS
    ).stdout

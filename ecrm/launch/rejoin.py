"""Lost hosts brought back by the launch: `ecrm join` typed on each, again and again.

A host whose join ends is tried again after a pause. The pause doubles, and begins anew once a join
has lasted for long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ecrm.base.errors import UsageError
from ecrm.launch.hosts_file import Host
from ecrm.launch.join import join_words
from ecrm.launch.remote_host import starter_words
from ecrm.process.linux import when_parent_ends
from ecrm.run.joining import FILE, why_closed
from ecrm.run.reading import read_own
from ecrm.run.session_folders import has_ended, newest_session

FIRST_PAUSE = 2.0
LONGEST_PAUSE = 600.0
LOOK_SECONDS = 0.5
END_SECONDS = 1.0
"""The longest wait for the end of a join that was killed."""
Process = Any
"""A started command: has `poll` as subprocess.Popen."""


class Rejoin:
    """The joins of a run's hosts; `look` starts the joins that are due.

    `begin(host)` types `ecrm join` on a host, and raises OSError if no command can be started.
    `lost()` returns the names of hosts with lost ranks, or `None` if not known, and `closed()` why
    no rank can join any more.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        lost: Callable[[], set[str] | None],
        begin: Callable[[Host], Process],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        closed: Callable[[], str] = lambda: "",
    ) -> None:
        self._hosts, self._lost, self._begin = dict.fromkeys(hosts), lost, begin
        self._say, self._clock, self._closed = say, clock, closed
        self._told: set[Host] = set()
        self._pause = dict.fromkeys(self._hosts, FIRST_PAUSE)
        self._due: dict[Host, float] = {}
        self._began: dict[Host, float] = {}
        self._whole: set[Host] = set()
        self.running: dict[Host, Process] = {}
        """The latest join of each host."""
        self.left: list[Process] = []
        """Joins of hosts that are lost again: a starter may hear of a loss late, or never."""

    def look(self) -> None:
        """Start the joins that are due, and note the joins that have ended."""
        now, lost = self._clock(), self._lost()
        if lost is None:
            return
        self.left = [process for process in self.left if process.poll() is None]
        for host, process in list(self.running.items()):
            ended = (code := process.poll()) is not None
            if not ended and host.name not in lost:
                self._whole.add(host)
            elif ended or host in self._whole:  # or the host is lost again
                del self.running[host]
                self._whole.discard(host)
                self.left += [] if ended else [process]
                self._wait(host, now, now - self._began[host] > 10 * self._pause[host])
                if code and host.name in lost:
                    self._say(
                        f"host {host.name}: ecrm join ended with {code}, "
                        f"trying again in {self._pause[host]:.0f} s"
                    )
        for host in self._hosts:
            if host.name not in lost or host in self.running:
                continue
            if why := self._closed():
                if host not in self._told:
                    self._say(f"host {host.name} stays lost: {why}")
                self._told.add(host)
                continue
            if now >= self._due.setdefault(host, now + self._pause[host]):
                del self._due[host]
                self._began[host] = now
                try:
                    self.running[host] = self._begin(host)
                except OSError as error:
                    self._wait(host, now, anew=False)
                    self._say(
                        f"host {host.name}: cannot run the starter {error.filename}: "
                        f"{error.strerror}, trying again in {self._pause[host]:.0f} s"
                    )
                else:
                    self._say(f"host {host.name}: asked to join again (cluster.rejoin)")

    def _wait(self, host: Host, now: float, anew: bool) -> None:
        """Have a host wait before its next join: as at first if `anew`, else twice as long."""
        self._pause[host] = FIRST_PAUSE if anew else min(2 * self._pause[host], LONGEST_PAUSE)
        self._due[host] = now + self._pause[host]


def lost_hosts(run_dir: Path, placed: Sequence[Host], launch: str | None) -> set[str] | None:
    """The names of hosts with ranks lost in a launch, by ranks.json; `None` if not readable now.

    Empty before ranks can join, and after the end of the run.
    """
    if not (run_dir / FILE).exists() or has_ended(run_dir, launch):
        return set()
    ranks = read_own(newest_session(run_dir) / "ranks.json", launch).get("ranks", [])
    return {placed[each["rank"]].name for each in ranks if not each["live"]} if ranks else None


@contextlib.contextmanager
def rejoining(
    run_dir: Path,
    placed: Sequence[Host],
    starter: str,
    launch: str | None,
    show: Callable[[Iterable[str]], None],
) -> Iterator[None]:
    """Bring lost hosts back while the run of a launch goes on; ends all joins in the end.

    `show` prints lines, and returns at their end.
    """

    def begin(host: Host) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            starter_words(starter, host, join_words(run_dir, host.name)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
            preexec_fn=lambda: when_parent_ends(signal.SIGKILL),
        )
        threading.Thread(target=show, args=(process.stdout,), name="lines", daemon=True).start()
        return process

    def say(line: str) -> None:
        show([f"{line}\n"])

    over = threading.Event()
    joins = Rejoin(
        placed,
        lambda: lost_hosts(run_dir, placed, launch),
        begin,
        say,
        closed=lambda: why_closed(run_dir, launch),
    )

    def work() -> None:
        while not over.wait(LOOK_SECONDS):
            with contextlib.suppress(OSError, UsageError):
                joins.look()

    # the thread that starts a process must outlive it: Linux ties the two together
    thread = threading.Thread(target=work, name="rejoin", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for process in [*joins.running.values(), *joins.left]:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            # a starter of another user, as under sudo, ends by itself with the run
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)

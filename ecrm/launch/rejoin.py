"""Lost hosts brought back by the launch: `ecrm join` typed on each, again and again.

A host that is lost again, or whose join ends without effect, is tried again after a pause. The
pause doubles, and begins anew once a host has been back for long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecrm.base.errors import UsageError
from ecrm.base.wording import named
from ecrm.launch.hosts_file import Host
from ecrm.launch.join import join_words
from ecrm.launch.remote_host import starter_words
from ecrm.process.linux import when_parent_ends
from ecrm.run.joining import FILE, why_closed
from ecrm.run.reading import read_own
from ecrm.run.session_folders import has_ended, newest_session

FIRST_PAUSE = 2.0
LONGEST_PAUSE = 600.0
LONG_LIFE = 10.0
"""A host that is back for so many times its pause counts as well: its pause begins anew."""
JOIN_SECONDS = 600.0
"""Seconds for the ranks of a join to load torch and to be admitted; then a further join begins."""
LOOK_SECONDS = 0.5
END_SECONDS = 1.0
"""The longest wait for the end of a join that was killed."""
Process = Any
"""A started command: has `poll` as subprocess.Popen."""


@dataclass
class Join:
    """A started join of these lost ranks; `back` is the time at which all of them were back."""

    process: Process
    ranks: frozenset[int]
    began: float
    back: float | None = None


class Rejoin:
    """The joins of a run's hosts; `look` starts the joins that are due.

    `begin(host)` types `ecrm join` on a host, and raises OSError if no command can be started.
    `lost()` returns the lost ranks of each host by name, or `None` if not known, and `closed()` why
    no rank can join any more.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        lost: Callable[[], Mapping[str, Set[int]] | None],
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
        self._running: dict[Host, Join] = {}
        """The latest join of each host."""
        self._left: list[Process] = []
        """Earlier joins: a starter may hear of a loss late or never, or has ranks that live on."""

    @property
    def processes(self) -> list[Process]:
        """All joins that may go on."""
        return [*(join.process for join in self._running.values()), *self._left]

    def look(self) -> None:
        """Start the joins that are due, and note the joins that are over."""
        now, lost = self._clock(), self._lost()
        if lost is None:
            return
        self._left = [process for process in self._left if process.poll() is None]
        for host, join in list(self._running.items()):
            self._judge(host, join, now, lost.get(host.name, frozenset()))
        for host in self._hosts:
            if not lost.get(host.name) or host in self._running:
                continue
            if why := self._closed():
                if host not in self._told:
                    self._say(f"host {host.name} stays lost: {why}")
                self._told.add(host)
            elif now >= self._due.setdefault(host, now + self._pause[host]):
                self._start(host, now, frozenset(lost[host.name]))

    def _judge(self, host: Host, join: Join, now: float, lost: Set[int]) -> None:
        """Note that a join's ranks are back, or that a join is over."""
        code = join.process.poll()
        if code is None and not join.ranks & lost:
            join.back = now if join.back is None else join.back
        waits = code is None and join.back is None and now - join.began < JOIN_SECONDS
        if waits or (code is None and not lost):
            return
        del self._running[host]
        if code is None:
            self._left.append(join.process)
        anew = join.back is not None and now - join.back >= LONG_LIFE * self._pause[host]
        self._wait(host, now, anew)
        again = f"trying again in {self._pause[host]:.0f} s"
        if code and lost:
            self._say(f"host {host.name}: ecrm join ended with {code}, {again}")
        elif code is None and join.back is None:
            away = named("rank", sorted(join.ranks & lost))
            self._say(f"host {host.name}: {away} did not join in {JOIN_SECONDS:.0f} s, {again}")

    def _start(self, host: Host, now: float, ranks: frozenset[int]) -> None:
        del self._due[host]
        try:
            self._running[host] = Join(self._begin(host), ranks, now)
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


def lost_ranks(
    run_dir: Path, placed: Sequence[Host], launch: str | None
) -> Mapping[str, Set[int]] | None:
    """The ranks lost in a launch by name of their host, by ranks.json; `None` if not readable now.

    Empty before ranks can join, and after the end of the run.
    """
    if not (run_dir / FILE).exists() or has_ended(run_dir, launch):
        return {}
    ranks = read_own(newest_session(run_dir) / "ranks.json", launch).get("ranks", [])
    lost: dict[str, set[int]] = {}
    for rank in (each["rank"] for each in ranks if not each["live"]):
        lost.setdefault(placed[rank].name, set()).add(rank)
    return lost if ranks else None


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
        lambda: lost_ranks(run_dir, placed, launch),
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
        for process in joins.processes:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            # a starter of another user, as under sudo, ends by itself with the run
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)

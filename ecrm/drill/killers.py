"""SIGKILLs from outside, by pid, while a run goes on.

Killed are ranks waiting in a phase of a step, random ranks whenever the run can survive, or whole
hosts.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecrm.base.epoch_drafts import PREFIX
from ecrm.config.faults import Kill
from ecrm.drill.options import HostKill, RandomKills
from ecrm.drill.run_record import KillDone
from ecrm.engine.events import KillDue
from ecrm.run.reading import Event, EventTail, read_json
from ecrm.run.run_folder import SUMMARY_DRAFT

POLL_SECONDS = 0.05
DUE_POLL_SECONDS = 0.005  # a rank waits for its death, and the other ranks wait for the rank
# after the draft perhaps no rank is left to notice a death
OVER = ("summary.json", "failure.json", "rejected.json", f"{PREFIX}*/*/{SUMMARY_DRAFT}")


@dataclass
class Survivability:
    """The chances of the next kill, as told by a run's events.

    `failures_left` is `None` until first told by the run; `dead` are the ranks with a death noticed
    by the run.
    """

    started: bool = False
    failures_left: int | None = None
    dead: frozenset[int] = frozenset()
    world: frozenset[int] = frozenset()

    def take(self, events: Iterable[Event]) -> None:
        """Take in newer events."""
        for event in events:
            self.failures_left = event.get("failures_left", self.failures_left)
            if event["event"] == "start":
                self.started, self.world = True, frozenset(range(event["world_size"]))
            elif event["event"] == "failure":
                self.dead |= set(event["ranks"])
            # a view shows deaths too, even if the failure event died with the reporter
            elif event["event"] == "view":
                self.dead |= self.world - set(event["live"])

    def victims(
        self, ranks: Sequence[dict[str, Any]], killed: Iterable[int]
    ) -> list[dict[str, Any]]:
        """Entries of ranks.json to choose from, by rank.

        Empty if the run could not survive one more death now. A killed rank without a noticed death
        already uses up one of the deaths left.
        """
        gone = {*killed, *self.dead}
        unnoticed = set(killed) - self.dead
        if self.failures_left is None or self.failures_left - len(unnoticed) < 1:
            return []
        return sorted(
            (entry for entry in ranks if entry["live"] and entry["rank"] not in gone),
            key=lambda e: e["rank"],
        )


def draws(wanted: RandomKills) -> Iterator[tuple[float, float]]:
    """For each kill, without end: (gap before the kill in seconds, position among the live ranks).

    The position is from 0 to below 1. A seed thus names the same ranks whatever the timing, as long
    as ranks are killed one after the other.
    """
    numbers = random.Random(wanted.seed)
    while True:
        yield numbers.expovariate(1 / wanted.mtbf_seconds), numbers.random()


class KillerThread(threading.Thread, ABC):
    """Kills ranks of the run in `folder` until all kills are done or `finish` is called.

    `done` are the kills so far. `held_back_seconds` is how long, at the end, the next kill waited
    in vain for a survivable moment. `say` gets a line per kill. `_kill_all` of a subclass decides
    on ranks and times.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(name="drill-killer", daemon=True)
        self.done: list[KillDone] = []
        self.held_back_seconds = 0.0
        self._folder, self._say = folder, say
        self._tail = EventTail(folder / "events.jsonl")
        self._ending = threading.Event()
        self._error: Exception | None = None

    def finish(self) -> None:
        """Kill no more, and raise the error of the thread, if any."""
        self._ending.set()
        self.join()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Run the thread; an error waits for `finish`."""
        try:
            self._kill_all()
        except Exception as error:
            self._error = error

    @abstractmethod
    def _kill_all(self) -> None:
        """Make all kills of this thread, each at its time."""

    def _wait(self, seconds: float) -> bool:
        """Wait; return True if no kill is left to make, because the run or the killing is over."""
        return self._ending.wait(seconds) or any(
            any(self._folder.glob(pattern)) for pattern in OVER
        )

    def _kill(
        self, entry: dict[str, Any], waited_seconds: float = 0.0, scheduled: str | None = None
    ) -> bool:
        """SIGKILL one rank unless its process is gone; return whether the rank was killed."""
        kill = kill_rank(self._folder, entry, waited_seconds, scheduled)
        if kill is None:
            return False
        self.done.append(kill)
        self._say(f"! drill: SIGKILL to rank {kill.rank} (pid {kill.pid})")
        return True


class RandomKiller(KillerThread):
    """Kills `wanted` random ranks, each at a survivable moment."""

    def __init__(self, folder: Path, wanted: RandomKills, say: Callable[[str], None]) -> None:
        super().__init__(folder, say)
        self._wanted, self._state = wanted, Survivability()

    def _kill_all(self) -> None:
        """Wait for the start, then for each gap, then for a survivable moment."""
        while not self._state.started:
            if self._wait(POLL_SECONDS):
                return
            self._state.take(self._tail.new_events())
        for gap, position in itertools.islice(draws(self._wanted), self._wanted.count):
            if self._wait(gap) or not self._kill_when_survivable(position):
                return

    def _kill_when_survivable(self, position: float) -> bool:
        """Kill the live rank at `position`, 0 to below 1, as soon as the run can survive the kill.

        Returns False if the run was over before.
        """
        due = time.monotonic()
        while True:
            self._state.take(self._tail.new_events())
            victims = self._state.victims(_here(self._folder), [kill.rank for kill in self.done])
            if victims and self._kill(
                victims[int(position * len(victims))], time.monotonic() - due
            ):
                return True
            if self._wait(POLL_SECONDS):
                self.held_back_seconds = time.monotonic() - due
                return False


class ScheduledKiller(KillerThread):
    """Kills each rank of `kills` once the rank reports its phase, and waits in the phase.

    `hosts`: a kill in `hosts` kills all ranks of the rank's failure domain, for a `HostKill`.
    """

    def __init__(
        self,
        folder: Path,
        kills: Sequence[Kill],
        say: Callable[[str], None],
        hosts: Mapping[Kill, HostKill] | None = None,
    ) -> None:
        super().__init__(folder, say)
        self._due, self._hosts = {str(kill): kill for kill in kills}, hosts or {}

    def _kill_all(self) -> None:
        waiting: list[str] = []
        while self._due and not self._ending.wait(DUE_POLL_SECONDS):
            events = self._tail.new_events()
            waiting += [
                event["scheduled"]
                for event in events
                if event["event"] == KillDue.name and event["scheduled"] in self._due
            ]
            entries = {entry["rank"]: entry for entry in _here(self._folder)} if waiting else {}
            # ranks.json may come after the first report
            for text in [text for text in waiting if self._due[text].rank in entries]:
                waiting.remove(text)
                self._kill_due(self._due.pop(text), entries)

    def _kill_due(self, kill: Kill, entries: Mapping[int, dict[str, Any]]) -> None:
        host = self._hosts.get(kill)
        if host is None:
            self._kill(entries[kill.rank], scheduled=str(kill))
            return
        name = entries[kill.rank]["failure_domain"]
        self._say(f"! drill: host {name} is to die after step {host.step}")
        for entry in entries.values():
            if entry["live"] and entry["failure_domain"] == name:
                self._kill(entry, scheduled=str(host))


def hosts_of(folder: Path) -> dict[str, int]:
    """The failure domains of a run by name, each with its lowest rank, ordered by lowest rank."""
    ranks = read_json(folder / "ranks.json").get("ranks", [])
    lowest: dict[str, int] = {}
    for entry in sorted(ranks, key=lambda entry: entry["rank"]):
        lowest.setdefault(entry["failure_domain"], entry["rank"])
    return lowest


def kill_rank(
    folder: Path, entry: dict[str, Any], waited_seconds: float = 0.0, scheduled: str | None = None
) -> KillDone | None:
    """SIGKILL a rank of the run in `folder`.

    Returns `None` if the rank's process is gone, or if a different program has the pid by now.
    """
    try:
        if os.fsencode(folder) not in Path(f"/proc/{entry['pid']}/cmdline").read_bytes().split(
            b"\0"
        ):
            return None
        now = time.time()
        os.kill(entry["pid"], signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return KillDone(now, entry["rank"], scheduled, entry["pid"], waited_seconds)


def _here(folder: Path) -> list[dict[str, Any]]:
    """Entries of ranks.json with pids of this machine."""
    ranks = read_json(folder / "ranks.json").get("ranks", [])
    return [entry for entry in ranks if entry["host"] == socket.gethostname()]

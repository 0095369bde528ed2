"""SIGKILLs from outside, by pid, while a run goes on: of random ranks, where the run can survive it, or of whole hosts."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecrm.drill.events import Event, EventTail
from ecrm.drill.options import RandomKills
from ecrm.drill.record import KillDone
from ecrm.launch.supervise import read_json
from ecrm.train.run_folder import SUMMARY_DRAFT

POLL_SECONDS = 0.05
OVER = ("summary.json", "failure.json", "rejected.json", SUMMARY_DRAFT)  # after the draft nobody may be left who has to notice


@dataclass
class Survivability:
    """What a run's events say about the next kill.

    `failures_left` is None until the run has said so once; `dead` are the ranks whose death it has noticed.
    """

    started: bool = False
    failures_left: int | None = None
    dead: frozenset[int] = frozenset()
    world: frozenset[int] = frozenset()

    def take(self, events: Iterable[Event]) -> None:
        """Bring it up to date with newer events."""
        for event in events:
            self.failures_left = event.get("failures_left", self.failures_left)
            if event["event"] == "start":
                self.started, self.world = True, frozenset(range(event["world_size"]))
            elif event["event"] == "failure":
                self.dead |= set(event["ranks"])
            elif event["event"] == "view":  # names also those whose failure event died with the rank that writes
                self.dead |= self.world - set(event["live"])

    def victims(self, ranks: Sequence[dict[str, Any]], killed: Iterable[int]) -> list[dict[str, Any]]:
        """Entries of ranks.json to choose from, by rank; none when the run could not survive one more death now.

        A killed rank whose death was not noticed yet is already one death of those left.
        """
        gone = {*killed, *self.dead}
        unnoticed = set(killed) - self.dead
        if self.failures_left is None or self.failures_left - len(unnoticed) < 1:
            return []
        return sorted((entry for entry in ranks if entry["live"] and entry["rank"] not in gone), key=lambda e: e["rank"])


def draws(wanted: RandomKills) -> Iterator[tuple[float, float]]:
    """For each kill, without end: the gap before it in seconds, and a position (0 to below 1) among the live ranks.

    So a seed names the same ranks whatever the timing, as long as one is killed after the other.
    """
    numbers = random.Random(wanted.seed)
    while True:
        yield numbers.expovariate(1 / wanted.mtbf_seconds), numbers.random()


class Killer(threading.Thread):
    """Kills ranks of the run in `folder` until `finish` is called; `done` are the kills so far.

    `held_back_seconds` is how long, at the end, the next kill waited in vain for a moment to be survived.

    `say` gets a line per kill.
    """

    def __init__(self, folder: Path, wanted: RandomKills, say: Callable[[str], None]) -> None:
        super().__init__(name="drill-killer", daemon=True)
        self.done: list[KillDone] = []
        self.held_back_seconds = 0.0
        self._folder, self._wanted, self._say = folder, wanted, say
        self._tail, self._state = EventTail(folder / "events.jsonl"), Survivability()
        self._ending = threading.Event()
        self._error: Exception | None = None

    def finish(self) -> None:
        """Kill no more, and raise what went wrong in the thread, if anything did."""
        self._ending.set()
        self.join()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """The thread: wait for the start, then for each gap, then for a moment at which a kill is survivable."""
        try:
            while not self._state.started:
                if self._wait(POLL_SECONDS):
                    return
                self._state.take(self._tail.new_events())
            for gap, position in itertools.islice(draws(self._wanted), self._wanted.count):
                if self._wait(gap) or not self._kill_when_survivable(position):
                    return
        except Exception as error:  # noqa: BLE001 - raised again where the drill waits for this thread
            self._error = error

    def _wait(self, seconds: float) -> bool:
        """True if there is nothing more to kill."""
        return self._ending.wait(seconds) or any((self._folder / name).exists() for name in OVER)

    def _kill_when_survivable(self, position: float) -> bool:
        """Kill the rank at `position` (0 to below 1) of the live ones as soon as may be; False if the run was over before."""
        due = time.monotonic()
        while True:
            self._state.take(self._tail.new_events())
            victims = self._state.victims(_here(self._folder), [kill.rank for kill in self.done])
            if victims and self._kill(victims[int(position * len(victims))], time.monotonic() - due):
                return True
            if self._wait(POLL_SECONDS):
                self.held_back_seconds = time.monotonic() - due
                return False

    def _kill(self, entry: dict[str, Any], waited_seconds: float) -> bool:
        """SIGKILL one rank unless its process is gone."""
        kill = kill_rank(self._folder, entry, waited_seconds)
        if kill is None:
            return False
        self.done.append(kill)
        self._say(f"! drill: SIGKILL to rank {kill.rank} (pid {kill.pid})")
        return True


class HostKiller(threading.Thread):
    """Kills whole hosts of the run in `folder`, each once its step is known to be finished; `done` are the kills so far.

    `wanted` are (name of the host, step). `say` gets a line per host.
    """

    def __init__(self, folder: Path, wanted: Sequence[tuple[str, int]], say: Callable[[str], None]) -> None:
        super().__init__(name="drill-host-killer", daemon=True)
        self.done: list[KillDone] = []
        self.held_back_seconds = 0.0
        self._folder, self._wanted, self._say = folder, sorted(wanted, key=lambda one: one[1]), say
        self._ending = threading.Event()

    def finish(self) -> None:
        """Kill no more."""
        self._ending.set()
        self.join()

    def run(self) -> None:
        """The thread: follow the progress events."""
        tail, step = EventTail(self._folder / "events.jsonl"), 0
        left = list(self._wanted)
        while left and not self._ending.wait(POLL_SECONDS):
            step = max([step, *(event["step"] for event in tail.new_events() if event["event"] == "progress")])
            while left and step >= left[0][1]:
                self._kill_host(left.pop(0)[0])

    def _kill_host(self, name: str) -> None:
        entries = [entry for entry in _here(self._folder) if entry["live"] and entry["failure_domain"] == name]
        kills = [kill for kill in (kill_rank(self._folder, entry) for entry in entries) if kill is not None]
        self.done += kills
        self._say(f"! drill: SIGKILL to host {name}: ranks {', '.join(str(kill.rank) for kill in kills)}")


def hosts_of(folder: Path) -> list[str]:
    """Names of the failure domains of a run, in the order of their lowest ranks."""
    ranks = read_json(folder / "ranks.json").get("ranks", [])
    return list(dict.fromkeys(entry["failure_domain"] for entry in sorted(ranks, key=lambda entry: entry["rank"])))


def kill_rank(folder: Path, entry: dict[str, Any], waited_seconds: float = 0.0) -> KillDone | None:
    """SIGKILL a rank of the run in `folder`; None if its process is gone, or its pid is another program's by now."""
    try:
        if os.fsencode(folder) not in Path(f"/proc/{entry['pid']}/cmdline").read_bytes().split(b"\0"):
            return None
        now = time.time()
        os.kill(entry["pid"], signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return KillDone(now, entry["rank"], pid=entry["pid"], waited_seconds=waited_seconds)


def _here(folder: Path) -> list[dict[str, Any]]:
    """Entries of ranks.json whose pids are this machine's."""
    ranks = read_json(folder / "ranks.json").get("ranks", [])
    return [entry for entry in ranks if entry["host"] == socket.gethostname()]

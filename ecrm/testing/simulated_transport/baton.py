"""Threads of which exactly one runs at any time; the seed decides the next thread."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from random import Random

PREFERENCE_CHANGES = 0.05


class Runner:
    """A thread with its lock and state."""

    __slots__ = ("finished", "lock", "number", "ready", "thread")

    def __init__(self, number: int) -> None:
        self.number = number
        # held from the start; a release hands the baton to this runner
        self.lock = _thread.allocate_lock()
        self.lock.acquire()
        self.thread: threading.Thread | None = None
        self.ready = True
        self.finished = False


class Baton:
    """Runs a body per runner, one runner at a time, until all have ended.

    A runner goes on until the runner waits or ends; the next runner is then drawn from the ready
    runners. In half of all seeds the draw is even; in the other half an order of preference decides
    and changes now and then, leaving some runners far behind.

    `when_idle` is called when all unfinished runners wait; the callback must make a runner ready.
    """

    def __init__(self, count: int, random: Random, when_idle: Callable[[], None]) -> None:
        self.runners = [Runner(number) for number in range(count)]
        self._ready = list(self.runners)
        self._random = random
        self._when_idle = when_idle
        self._preference = list(range(count)) if random.random() < 0.5 else None
        self._unfinished = count
        self._all_ended = _thread.allocate_lock()
        self._all_ended.acquire()

    def run(self, body: Callable[[int], None]) -> None:
        """Run `body(number)` once for each runner. `body` must not raise."""
        for runner in self.runners:
            runner.thread = threading.Thread(
                target=self._run_one,
                args=(runner, body),
                name=f"simulated rank {runner.number}",
                daemon=True,
            )
            runner.thread.start()
        self._next().lock.release()
        self._all_ended.acquire()
        for runner in self.runners:
            if runner.thread is not None:
                runner.thread.join()

    def make_ready(self, number: int) -> None:
        runner = self.runners[number]
        if not runner.ready and not runner.finished:
            runner.ready = True
            self._ready.append(runner)

    def wait(self, number: int) -> None:
        """Called by the running runner: return when the runner was made ready and drawn."""
        runner = self.runners[number]
        following = self._next()
        if following is not runner:
            following.lock.release()
            runner.lock.acquire()

    def _run_one(self, runner: Runner, body: Callable[[int], None]) -> None:
        runner.lock.acquire()
        body(runner.number)
        assert not runner.ready, (
            f"runner {runner.number} ended while it was due to run: the baton would be lost"
        )
        runner.finished = True
        self._unfinished -= 1
        if self._unfinished == 0:
            self._all_ended.release()
        else:
            self._next().lock.release()

    def _next(self) -> Runner:
        ready = self._ready
        while not ready:
            self._when_idle()
        if self._preference is None:
            place = int(self._random.random() * len(ready))
        else:
            if self._random.random() < PREFERENCE_CHANGES:
                self._random.shuffle(self._preference)
            preference = self._preference
            place = min(range(len(ready)), key=lambda i: preference[ready[i].number])
        runner = ready[place]
        ready[place] = ready[-1]
        ready.pop()
        runner.ready = False
        return runner

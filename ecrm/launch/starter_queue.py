"""Starters of one host take turns: sshd drops connections that are not logged in yet beyond ten."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ecrm.process.preflight import JOB_FOLDER

AT_ONCE = 4
"""Starters of a host that are under way at once, of sshd's ten (MaxStartups 10:30:100)."""


@contextlib.contextmanager
def turn(
    host: str, place: int, wait: Callable[[], None], environ: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Held while the rank that is number `place` of its host is started.

    At most AT_ONCE ranks of a host hold theirs. Calls `wait` between looks whether the turn has
    come. Without a folder of the job nobody waits.
    """
    folder = environ.get(JOB_FOLDER)
    if folder is None:
        yield
        return
    # A lock dies with its process, so a client that is killed holds up nobody.
    with open(Path(folder) / f"ecrm-start-{host}-{place % AT_ONCE}", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                wait()
        yield

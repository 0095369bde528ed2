"""Memory of the ranks of a run, by Pss: a page of n processes is an nth of a page in each."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from ecrm.launch.run_state import rank_states

EVERY_SECONDS = 0.1


def memory_of(pid: int) -> dict[str, int]:
    """Bytes of a process by kind of memory, from its smaps.

    `pss` of all, `private` to the process, and Pss of `anonymous` memory, of memory `shared` for
    messages and of `files`, which are libraries.
    """
    found = dict.fromkeys(("pss", "private", "anonymous", "shared", "files"), 0)
    kind = "anonymous"
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *rest = line.split(maxsplit=5)
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", name):
            path = rest[4] if len(rest) > 4 else ""
            kind = (
                "anonymous"
                if not path or path.startswith("[")
                else "shared"
                if path.startswith(("/memfd:", "/dev/shm/", "/dev/zero"))
                else "files"
            )
        elif name == "Pss:":
            found["pss"] += int(rest[0]) * 1024
            # a page of a library that was written is memory of the process alone
            found[kind] += int(rest[0]) * 1024
        elif name == "Pss_Anon:" and kind == "files":
            found["files"] -= int(rest[0]) * 1024
            found["anonymous"] += int(rest[0]) * 1024
        elif name in ("Private_Clean:", "Private_Dirty:"):
            found["private"] += int(rest[0]) * 1024
    return found


class PeakMemory:
    """The most memory of all ranks of a run together, read every EVERY_SECONDS in a `with` block.

    `folder` is the run's, on this host; the ranks are those of its ranks.json. `bytes` is the
    greatest sum of Pss, 0 for a run that ended before it was read. Reading takes processor time
    from the run.
    """

    def __init__(self, folder: Path) -> None:
        self.bytes = 0
        self._ranks, self._over = folder / "ranks.json", threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            total = 0
            for state in rank_states(self._ranks, set(), "training"):
                try:
                    total += memory_of(state.pid)["pss"]
                except OSError:  # the rank has ended
                    continue
            self.bytes = max(self.bytes, total)

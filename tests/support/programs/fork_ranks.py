"""Import once, then fork the ranks of a program: `fork_ranks.py PROGRAM RANKS CUTS TEXT WORD...`.

A line `RANK CODE` on standard output tells of the end of each rank.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.link_ranks import CUTS, JOIN


def main() -> None:
    program, ranks, cuts, text, *words = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("program", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    of_pid = {}
    for rank in range(int(ranks)):
        pid = os.fork()
        if not pid:
            os.environ.update({JOIN: f"{rank} {ranks} {text}", CUTS: cuts})
            sys.argv = [program, *words]
            try:
                module.main()
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        of_pid[pid] = rank
    while of_pid:
        pid, status = os.wait()
        print(of_pid.pop(pid), os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()

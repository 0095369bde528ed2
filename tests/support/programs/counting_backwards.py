"""`python -m ecrm ...` that notes each backward of a slot: a line with the cores it may run on.

The first argument names the file of these lines.
"""

from __future__ import annotations

import os
import runpy
import sys

from ecrm.session.slot_work import SlotWork

_, _counted, *sys.argv[1:] = sys.argv
_finish = SlotWork.finish


def finish(*words, **more):
    with open(_counted, "a") as file:
        file.write(f"{sorted(os.sched_getaffinity(0))}\n")
    return _finish(*words, **more)


SlotWork.finish = finish
runpy.run_module("ecrm", run_name="__main__", alter_sys=True)

"""`python -m ecrm ...` that notes each backward of a slot: a line with the cores it may run on.

The first argument names the file of these lines.
"""

from __future__ import annotations

import os
import runpy
import sys

from ecrm.train import trainer

_, _counted, *sys.argv[1:] = sys.argv
_backward = trainer.backward


def backward(*words):
    with open(_counted, "a") as file:
        file.write(f"{sorted(os.sched_getaffinity(0))}\n")
    return _backward(*words)


trainer.backward = backward
runpy.run_module("ecrm", run_name="__main__", alter_sys=True)

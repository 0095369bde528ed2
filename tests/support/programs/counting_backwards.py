"""`python -m ecrm ...` that adds a line to the file named first whenever a slot's backward is run: the cores it may run on."""

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

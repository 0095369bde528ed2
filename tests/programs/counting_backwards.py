"""`python -m ecrm ...` that adds a byte to the file named first whenever a slot's backward is run."""

from __future__ import annotations

import runpy
import sys

from ecrm.train import trainer

_, _counted, *sys.argv[1:] = sys.argv
_backward = trainer.backward


def backward(*words):
    with open(_counted, "ab") as file:
        file.write(b".")
    return _backward(*words)


trainer.backward = backward
runpy.run_module("ecrm", run_name="__main__", alter_sys=True)

"""`fenced_writer.py FOLDER WHAT`: the reporter of epoch 0, which stops itself before a rename.

WHAT is `checkpoint` or `ranks`. After SIGCONT the rename goes on; the last line says what came of
it.
"""

import os
import signal
import sys
from pathlib import Path

from ecrm.checkpoint.folder import CheckpointFolder
from ecrm.checkpoint.manifest import Manifest
from ecrm.run.run_folder import RunFolder

folder, what = Path(sys.argv[1]), sys.argv[2]
replace = os.replace


def stop_and_replace(old: object, new: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    replace(old, new)


if what == "checkpoint":
    checkpoints = CheckpointFolder(folder / "checkpoints")
    checkpoints.begin_epoch(0)
    checkpoints.draft(20)
    os.replace = stop_and_replace
    try:
        checkpoints.publish(Manifest(20, {"by": "fenced"}, None, 0, [], [], [], []))
        print("published")
    except OSError as error:
        print(error.strerror)
else:
    run = RunFolder(folder)
    run.begin_epoch(0, writes=True)
    os.replace = stop_and_replace
    run.trace({"by": "fenced"})
    print("replaced" if run.trouble is None else run.trouble.rpartition(": ")[2])

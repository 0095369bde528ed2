"""Runs a command as a rank of mpirun and notes its exit code in FOLDER/RANK.

Arguments: FOLDER COMMAND...
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

# from mpirun, for the command; the note comes first
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: None)
process = subprocess.Popen(sys.argv[2:])
code = process.wait()
(Path(sys.argv[1]) / os.environ["OMPI_COMM_WORLD_RANK"]).write_text(str(code))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)

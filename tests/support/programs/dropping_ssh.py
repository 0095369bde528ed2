"""`dropping_ssh.py FOLDER MOST COMMAND...`: runs a command as ssh would, with MaxStartups MOST.

A connection takes 0.3 s to log in. One that begins while MOST others do is dropped, with ssh's
words and exit code. FOLDER gets a file for each that began, with how many had not logged in then.
"""

import fcntl
import os
import subprocess
import sys
import time

folder, most, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]


def count(change: int) -> int:
    """How many connections had not logged in before this `change`."""
    with open(os.path.join(folder, "under way"), "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = int(file.read() or 0)
        file.truncate(0)
        file.write(str(before + change))
    return before


before = count(+1)
with open(os.path.join(folder, f"began-{os.getpid()}"), "w") as file:
    file.write(str(before))
if before >= most:
    count(-1)
    print("kex_exchange_identification: read: Connection reset by peer", file=sys.stderr)
    sys.exit(255)
time.sleep(0.3)
count(-1)
sys.exit(subprocess.run(command).returncode)

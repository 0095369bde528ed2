"""`imitated_ssh.py NAMESPACE FOLDER 'COMMAND'` runs a shell command on an imitated host, like ssh.

A host whose cable is out is not reached: the exit code is 255. What runs on the host is no child
of this process and outlives it, has an empty environment, a host name and a table of processes of
its own, and sees nothing of FOLDER; only standard input, output and error are passed on.

The hosts of a drill stay in one session. Linux shares out a CPU by session (autogroup): with a
session for each host, threads that only beat waited up to a second for two busy cores.
"""

import os
import subprocess
import sys
import threading

namespace, folder, command = sys.argv[1:]
cable = subprocess.run(
    ["ip", "-n", namespace, "-o", "link", "show", "eth0"], capture_output=True, text=True
)
if "NO-CARRIER" in cable.stdout:
    sys.exit(255)
inside = (
    f"hostname {namespace} && mount -t tmpfs none {folder} && mount -t tmpfs none /dev/shm "
    '&& cd / && exec sh -c "$0"'
)
remote = subprocess.Popen(
    [
        "ip",
        "netns",
        "exec",
        namespace,
        "unshare",
        "--uts",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "sh",
        "-c",
        inside,
        command,
    ],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    process_group=0,
    env={"PATH": os.environ["PATH"], "HOME": "/"},
)


def pass_on(reading: int, writing: int) -> None:
    while data := os.read(reading, 65536):
        os.write(writing, data)


remote.stdin.write(sys.stdin.buffer.read())
remote.stdin.close()
threads = [
    threading.Thread(target=pass_on, args=(stream.fileno(), number))
    for stream, number in ((remote.stdout, 1), (remote.stderr, 2))
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os._exit(remote.wait() & 0xFF)

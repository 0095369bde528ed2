"""The head of a run over several hosts: a process beside mpirun, and its start.

The head decides which ranks live (`ecrm.transport.membership`). The head has a process of its own,
out of reach of Ctrl-C and Ctrl-Z in the terminal of the launch, and ends with the launch.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from ecrm.base.errors import EcrmError
from ecrm.process.linux import when_parent_ends
from ecrm.process.remote_agent import START_SECONDS
from ecrm.transport.membership import Head
from ecrm.transport.membership_socket import LINKS, HeadServer, Rendezvous

RUN_BYTES, SECRET_BYTES = 16, 32
END_SECONDS = 2.0
NO_ANSWER = "no answer in time: launch again while this machine is less busy"


@contextlib.contextmanager
def run_head(hosts: Sequence[str], address: str, keep_alive: float) -> Iterator[dict[str, str]]:
    """A head for ranks on `hosts`, one host per rank; yields the variables for the ranks.

    The head listens on `address`, and prints on stderr. Raises EcrmError if the head cannot start.
    """
    run, secret = secrets.token_bytes(RUN_BYTES), secrets.token_bytes(SECRET_BYTES)
    process = subprocess.Popen(
        [sys.executable, "-m", "ecrm.launch.run_head"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: when_parent_ends(signal.SIGKILL),
    )
    assert process.stdin is not None and process.stdout is not None
    serves = threading.Event()
    passed_on = threading.Thread(target=_pass_on, args=(process, serves), name="head", daemon=True)
    passed_on.start()
    # on standard input: out of sight of other users
    order = [run.hex(), secret.hex(), list(hosts), address, keep_alive]
    try:
        with contextlib.suppress(OSError):  # it has died: standard output ends
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
        said = process.stdout.readline().strip() if ready else NO_ANSWER
        place, _, port = said.partition(" port ")
        if not port:
            why = said or f"it {_how(process.wait())}"
            raise EcrmError(f"the head of the run cannot start: {why}")
        rendezvous = Rendezvous(run, secret, (place, int(port)), keep_alive)
        serves.set()
        yield {LINKS: rendezvous.text()}
    finally:
        serves.clear()
        process.kill()
        process.wait()
        passed_on.join(END_SECONDS)


def _pass_on(process: subprocess.Popen[str], serves: threading.Event) -> None:
    """Print the lines of the head on stderr, and its end while it `serves` the launch."""
    assert process.stderr is not None
    for line in process.stderr:
        _say_here(line)
    if serves.is_set() and (code := process.wait()):
        _say_here(f"ecrm: the head of the run {_how(code)}: every rank ends\n")


def _how(code: int) -> str:
    return f"died of signal {-code}" if code < 0 else f"ended with {code}"


def _say_here(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        sys.stderr.write(line)
        sys.stderr.flush()


def main() -> None:
    """Take the order, print the place of the head, and serve until this process is killed."""
    run, secret, hosts, address, keep_alive = json.loads(sys.stdin.readline())
    try:
        server = HeadServer(
            Head(hosts, keep_alive), bytes.fromhex(run), bytes.fromhex(secret), address, _say
        )
    except OSError as error:
        print(f"cannot listen on {address}: {error.strerror}", flush=True)
        return
    print("{} port {}".format(*server.place), flush=True)
    while True:
        time.sleep(3600)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

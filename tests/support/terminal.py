"""A program that has a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import time

from support.drilling import RUN_SECONDS


def on_a_terminal(words: list[str], columns: int, **environ: str) -> tuple[int, int]:
    """(pid, the terminal's other end) of a program that has a terminal of so many columns."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.environ.update({"TERM": "xterm", **environ})
        os.execv(words[0], words)
    resize(descriptor, columns)
    return pid, descriptor


def resize(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def read(descriptor: int, until: bytes = b"\0never") -> bytes:
    """What comes from a terminal until some bytes are in it, or its program has ended."""
    data, deadline = b"", time.monotonic() + RUN_SECONDS
    while until not in data:
        assert time.monotonic() < deadline
        try:
            more = os.read(descriptor, 1 << 16)
        except OSError:
            return data
        if not more:
            return data
        data += more
    return data


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

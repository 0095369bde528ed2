"""Every command of every tutorial, typed in the page's order: it prints what the page shows.

About ten minutes on two cores, and 4 GB of disk.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.paths import ROOT
from support.walked_page import TUTORIALS, Block, blocks_of, not_printed

DATA = "datasets/generated-200000-by-hand"
GENERATE = f"""\
ecrm generate criteo --rows 200000 --seed 1 --output datasets/generated.txt
ecrm prepare criteo datasets/generated.txt --output {DATA}"""
SECONDS = 1800
"""After which a command counts as hanging, on a machine that may have other work."""
INSTEAD = {
    "apt install python3-venv make g++": "",
    'pip install "ecrm[tables]"': "",
    "make train": f"{GENERATE}; ecrm doctor; ecrm launch quickstart --set data.path={DATA}",
    GENERATE: "",
    "ecrm launch CONFIG --set checkpoint.every_minutes=30": (
        f"ecrm launch quickstart --set data.path={DATA} --set checkpoint.every_minutes=30"
    ),
}
"""Commands typed otherwise here: what installs, and what `make` and the page do alike."""
TYPED_AGAIN = "--run-dir runs/long --resume auto"
"""The page has this line stopped by Ctrl-C, and typed two times more."""
BY_HAND = "--run-dir runs/by-hand"
"""The page has a rank of this line killed in a second terminal."""
LOOSELY = ("stopped by SIGINT", "from step 203", "step  200/4218", "! shard 1 restored")
"""Output that depends on when a hand, or a lost server, has come: numbers are not compared."""
OF_ONE_CPU = ("your-model",)
"""Pages with layers of torch, whose last bits, and so whose hashes, may depend on the CPU."""
NOT_TYPED = "ecrm: error: train.py failed on rank 4"
"""An example of an error in a script that the page does not show."""
EXIT_CODES = {"cluster.trainers=3": 2, "protection.k=6": 2, "runs/two": 3}
"""Blocks whose last command fails, by words in the block."""


class Walk:
    """A terminal in a folder with what a checkout has."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.exports = folder, ""
        (folder / "datasets").mkdir(parents=True)
        for name in ("examples", "ecrm"):
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(sys.prefix)

    def start(self, words: str) -> subprocess.Popen[str]:
        words = words.replace("data.path=DIR", f"data.path={DATA}")
        return subprocess.Popen(
            ["bash", "-c", f"source .venv/bin/activate\n{self.exports}\n{words}"],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self, run: subprocess.Popen[str]) -> str:
        """All that a line prints, once the line has ended."""
        try:
            return run.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            raise AssertionError(f"not finished after {SECONDS} s: {run.args}") from None

    def type(self, block: str) -> str:
        """What a block prints."""
        lines = block.splitlines(keepends=True)
        self.exports += "".join(line for line in lines if line.startswith("export ")) + "\n"
        done = self.start(block)
        output = self.end(done)
        wanted = next((code for key, code in EXIT_CODES.items() if key in block), 0)
        assert done.returncode == wanted, f"{block}\n{output}"
        return output

    def until(self, file: str, pattern: str) -> str:
        """The first text of a file in which a pattern is found."""
        deadline, text = time.monotonic() + SECONDS, ""
        while time.monotonic() < deadline:
            path = self.folder / file
            text = path.read_text() if path.exists() else ""
            if re.search(pattern, text):
                return text
            time.sleep(0.1)
        raise AssertionError(f"{file}: no {pattern}\n{text}")

    def stopped_and_gone_on(self, words: str) -> str:
        """A line stopped by Ctrl-C, and typed two times more."""
        run = self.start(words)
        self.until("runs/long/events.jsonl", '"event": "progress", "step": 200')
        os.killpg(run.pid, signal.SIGINT)
        output = self.end(run)
        assert run.returncode == 130, output
        return output + self.type(words) + self.type(words)

    def killed_by_hand(self, words: str, second_terminal: str) -> str:
        """A line with rank 1 killed from a second terminal."""
        run = self.start(words)
        self.until("runs/by-hand/events.jsonl", '"event": "progress", "step": 200')
        look, kill = second_terminal.splitlines()
        (pid,) = re.findall(r'"pid": (\d+)', self.type(look))
        self.type(kill.replace("PID", pid))
        output = self.end(run)
        assert run.returncode == 0, output
        return output


def walk(page: Path, terminal: Walk) -> list[str]:
    """Type a page's commands; returns the lines of the page that were not printed."""
    wrong: list[str] = []
    everything = since = held = ""
    for block in blocks_of(page):
        if block.kind == "sh":
            if TYPED_AGAIN in block.text:
                printed = terminal.stopped_and_gone_on(block.text)
            elif BY_HAND in block.text:
                held, printed = block.text, ""
            elif held:
                held, printed = "", terminal.killed_by_hand(held, block.text)
            else:
                printed = terminal.type(INSTEAD.get(block.text, block.text))
            since, everything = since + printed, everything + printed
        elif block.kind == "" and not block.text.startswith(NOT_TYPED):
            loosely = any(words in block.text for words in LOOSELY)
            wrong += not_printed(block.text, since or everything, loosely)
            if page.stem in OF_ONE_CPU:
                wrong = [line for line in wrong if not line.startswith("model_")]
            since = ""
        elif block.kind == "toml":
            wrong += file_shown(block, terminal.folder)
    return wrong


def file_shown(block: Block, folder: Path) -> list[str]:
    """Write a file that the page has written, or compare a file that a command has written."""
    if written := re.search(r"into `(\w+\.toml)`", block.before):
        (folder / written[1]).write_text(f"{block.text}\n")
        return []
    there = (folder / "visits.toml").read_text().strip()
    return [] if there == block.text.strip() else [f"visits.toml is\n{there}"]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_the_page_shows(page, tmp_path):
    terminal = Walk(tmp_path / "walked")
    if page.stem != "first-run" and any(word in page.read_text() for word in ("$DATA", "=DIR")):
        terminal.type(GENERATE)
        terminal.exports = f"export DATA={DATA}\n"
    assert "\n".join(walk(page, terminal)) == ""

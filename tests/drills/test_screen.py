"""The bar of a real run on a terminal."""

from __future__ import annotations

import json

from ecrm.launch.screen import PROGRESS_LINE
from support.drilling import BASE, launch_words
from support.terminal import exit_code, on_a_terminal, read, resize


def test_a_run_on_a_terminal_shows_a_bar_and_survives(tmp_path, criteo_rows, undisturbed):
    kills = ("1@12:parity",)
    sets = {**BASE, "protection.verify_parity_at_end": True, "protection.rebuild_rows_per_step": 8}
    words = launch_words(tmp_path / "run", criteo_rows, sets, kills)
    pid, terminal = on_a_terminal(words, 80, NO_COLOR="1")
    shown = read(terminal, b"starting 6 ranks").decode()
    resize(terminal, 40)
    shown += read(terminal).decode()
    assert exit_code(pid) == 0, shown
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["model_sha256"] == undisturbed
    )
    assert "\x1b[2Kstarting 6 ranks" in shown and "! rank 1 died in step 12" in shown
    assert "100%" in shown and f"model_sha256 {undisturbed}" in shown
    assert not any(PROGRESS_LINE.match(line) and "committed" in line for line in shown.splitlines())
    assert "\x1b[3" not in shown, "NO_COLOR"

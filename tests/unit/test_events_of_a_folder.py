"""events.jsonl of a long run: read line by line, and cut where a power cut tore the last line."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from ecrm.run.auto_resume import EVENTS, events_of, lives_of, tidy

START = {"event": "start", "time": 1.0}


def test_the_events_of_a_long_run_are_never_in_memory_together(tmp_path):
    progress = json.dumps({"event": "progress", "time": 2.0, "step": 7, "finished": "x" * 1000})
    with open(tmp_path / EVENTS, "w") as file:
        for _ in range(2):
            file.write(json.dumps(START) + "\n")
            file.writelines([progress + "\n"] * 10_000)
    tracemalloc.start()
    try:
        lives = lives_of(events_of(tmp_path), "killed")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [life["seen_step"] for life in lives] == [7, 7]
    assert peak < 1_000_000, "a tenth of the file's 20 MB would be read at once"


def test_a_start_behind_a_torn_line_is_read(tmp_path):
    """A rank was killed while writing, and the next start writes on."""
    torn = b'{"time": 1.0, "event": "sta'
    (tmp_path / EVENTS).write_bytes(torn + b'{"time": 2.0, "event": "start"}\n')
    assert list(events_of(tmp_path)) == [{"time": 2.0, "event": "start"}]


def test_a_line_that_is_no_event_is_left_out(tmp_path):
    (tmp_path / EVENTS).write_bytes(json.dumps(START).encode() + b'\n\xff\xfe\n{"event": "sta')
    assert list(events_of(tmp_path)) == [START]
    assert list(events_of(tmp_path / "none")) == []


@pytest.mark.parametrize("whole", ["", "a\n", "a\nb\n", "a" * 70_000 + "\n"])
@pytest.mark.parametrize("torn", [0, 1, 70_000, 200_000])
def test_a_torn_last_line_is_cut_off(tmp_path, whole, torn):
    (tmp_path / EVENTS).write_text(whole + "t" * torn)
    tidy(tmp_path)
    assert (tmp_path / EVENTS).read_text() == whole

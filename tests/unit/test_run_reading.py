"""events.jsonl as a drill reads it: whole, growing, and with lines that a dying rank cut short."""

import json
import tracemalloc

from ecrm.run.reading import EventTail, parse_events


def line(time: float, kind: str = "view", **fields) -> str:
    return json.dumps({"time": time, "event": kind, **fields}) + "\n"


def test_every_line_is_an_event():
    events, damaged = parse_events(line(1.0) + line(2.0, "failure", ranks=[1]))
    assert [event["time"] for event in events] == [1.0, 2.0] and damaged == 0
    assert events[1]["ranks"] == [1]


def test_no_text_no_events():
    assert parse_events("") == ([], 0)


def test_a_line_cut_by_a_kill_is_counted_and_the_next_one_saved():
    cut = line(2.0, "progress", finished=[[1, 1.5]])[:30]
    events, damaged = parse_events(line(1.0) + cut + line(3.0) + line(4.0))
    assert [event["time"] for event in events] == [1.0, 3.0, 4.0] and damaged == 1


def test_a_cut_last_line_and_a_line_that_is_no_event_are_damaged():
    events, damaged = parse_events(line(1.0) + '["time"]\n' + line(2.0)[:12])
    assert [event["time"] for event in events] == [1.0] and damaged == 2


def test_a_growing_file_hands_out_each_complete_line_once(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert list(tail.new_events()) == []
    text = line(1.0) + line(2.0)
    path.write_text(text[:-5])
    assert [event["time"] for event in tail.new_events()] == [1.0]
    path.write_text(text + line(3.0))
    assert [event["time"] for event in tail.new_events()] == [2.0, 3.0]
    assert list(tail.new_events()) == []


def test_a_file_that_cannot_be_read_for_a_while_loses_no_event(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    path.mkdir()  # opening it raises an OSError, as a file server that is away does
    assert list(tail.new_events()) == []
    path.rmdir()
    path.write_text(line(1.0))
    assert [event["time"] for event in tail.new_events()] == [1.0]


def test_a_skipped_file_hands_out_what_is_written_after_it(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    tail.skip()  # no file yet
    text = "".join(line(float(number)) for number in range(5000))  # several blocks
    path.write_text(text + line(1.0)[:-5])
    tail.skip()
    assert list(tail.new_events()) == []
    path.write_text(text + line(1.0) + line(2.0))
    assert [event["time"] for event in tail.new_events()] == [1.0, 2.0]
    path.write_text("x" * 200_000)
    tail.skip()
    path.write_text(line(3.0))
    assert [event["time"] for event in tail.new_events()] == [3.0]


def test_the_events_of_a_large_file_are_not_held_at_once(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(line(1.0) * 200_000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in EventTail(path).new_events()) == 200_000
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 4
    finally:
        tracemalloc.stop()

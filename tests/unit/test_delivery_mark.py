"""The mark of steps told to a script, in files that every rank sees."""

from __future__ import annotations

from ecrm.run.log_delivery import FileMark


def test_a_rank_that_writes_late_takes_no_step_back(tmp_path):
    first, second, third = (FileMark(tmp_path, rank) for rank in range(3))
    first.begin(0)
    first.write(7, -1)
    assert second.read() == (7, -1)
    second.write(9, 40)
    first.write(8, -1)  # given up, and awake once more
    assert third.read() == (9, 40)


def test_marks_of_an_earlier_run_in_the_folder_count_no_more(tmp_path):
    FileMark(tmp_path, 1).write(90, 95)
    FileMark(tmp_path, 0).write(91, 95)
    FileMark(tmp_path, 0).begin(3)
    assert FileMark(tmp_path, 1).read() == (3, -1)


def test_a_damaged_mark_and_an_empty_folder_tell_of_no_step(tmp_path):
    assert FileMark(tmp_path, 0).read() == (0, -1)
    (tmp_path / "told-1").write_text("4")
    assert FileMark(tmp_path, 0).read() == (0, -1)

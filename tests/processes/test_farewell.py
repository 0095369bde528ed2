"""A program's end, for objects that were taken out of collections before."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, sys
from ecrm.process import farewell

{made}

def leave(farewell, gc, out):
    farewell.freeze()
    farewell._drop_variables()
    out.write("frozen " if gc.get_freeze_count() else "collected ")
    farewell._close_files()

leave(farewell, gc, sys.stdout)
"""
ENDS = """
class Ends:
    {slots}
    def __del__(self, out=sys.stdout):
        out.write("ended ")
thing = Ends()
"""
GENERATOR = """
def steps(out, me):
    try:
        yield
    finally:
        out.write("ended ")
me = []
me.append(steps(sys.stdout, me))
next(me[0])
"""
FILE = """
class Holds:
    pass
holds = Holds()
holds.me, holds.file = holds, open(sys.argv[1], "w")
holds.file.write("whole")
"""


def said(made: str, *words: str) -> list[str]:
    program = PROGRAM.format(made=made)
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.split()


def test_an_object_that_no_cycle_holds_ends_without_a_collection():
    assert said(ENDS.format(slots="")) == ["ended", "frozen"]


@pytest.mark.parametrize("slots", ["", "__slots__ = ('me',)"])
def test_an_object_in_a_cycle_ends_by_a_collection(slots):
    assert said(ENDS.format(slots=slots) + "thing.me = thing\n") == ["ended", "collected"]


def test_the_end_of_a_generator_in_a_cycle_runs():
    assert said(GENERATOR) == ["ended", "collected"]


def test_a_file_in_a_cycle_is_written_without_a_collection(tmp_path):
    assert said(FILE, str(tmp_path / "held")) == ["frozen"]
    assert (tmp_path / "held").read_text() == "whole"


def test_objects_without_an_end_stay_frozen():
    assert said("things = [{}, [], set()]\nthings.append(things)\n") == ["frozen"]

"""Lines of a run are records with rank and step, and printed whatever an application does."""

from __future__ import annotations

import logging
import logging.config
import os
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ecrm.base.console import say
from ecrm.base.errors import UsageError
from ecrm.base.log import LEVELS, LOGGER, PRINTER, SPEAKER, print_from
from ecrm.engine import events
from ecrm.run.reporter import Reporter
from ecrm.run.run_folder import RunFolder
from support.commands import ecrm
from support.paths import ROOT
from support.telling import an


class Kept(logging.Handler):
    """A handler of an application: keeps all records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept(monkeypatch) -> Iterator[list[logging.LogRecord]]:
    """The records that a handler of an application gets, on rank 3 in step 7."""
    monkeypatch.setattr(SPEAKER, "rank", 3)
    monkeypatch.setattr(SPEAKER, "step", 7)
    handler = Kept()
    logging.getLogger("ecrm").addHandler(handler)
    yield handler.records
    logging.getLogger("ecrm").removeHandler(handler)
    PRINTER.setLevel(logging.INFO)
    LOGGER.disabled = False
    LOGGER.setLevel(logging.INFO)


def test_a_line_is_printed_as_it_is_and_a_record_with_rank_and_step(kept, capsys):
    say("tables are built")
    say("! 100 % of a step", step=9)
    say("ecrm: error: no room", on_stderr=True)
    printed = capsys.readouterr()
    assert printed.out == "tables are built\n! 100 % of a step\n"
    assert printed.err == "ecrm: error: no room\n"
    assert [(each.levelname, each.rank, each.step, each.getMessage()) for each in kept] == [
        ("INFO", 3, 7, "tables are built"),
        ("WARNING", 3, 9, "! 100 % of a step"),
        ("ERROR", 3, 7, "ecrm: error: no room"),
    ]


def test_the_line_of_an_event_has_the_step_of_the_event(kept, capsys):
    reporter = Reporter(RunFolder(None), {}, events.Terms())
    view, state = SimpleNamespace(reporter=3), SimpleNamespace(commits=0)
    reporter.watch(SimpleNamespace(rank=3, view=view, step=8, committed=8, state=state))
    reporter.event(an(events.Failure, ranks=[1], step=5, phase="parity"))
    (record,) = kept
    assert (record.levelname, record.rank, record.step) == ("WARNING", 3, 5)
    assert record.getMessage().startswith("! rank 1 died in step 5 (parity); ")
    assert capsys.readouterr().out == f"{record.getMessage()}\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda: logging.config.dictConfig({"version": 1}),  # disables all loggers
        lambda: logging.getLogger("ecrm").setLevel(logging.CRITICAL),
    ],
)
def test_an_application_that_silences_the_logger_does_not_silence_the_terminal(
    kept, capsys, change
):
    change()
    say("! rank 1 died")
    assert capsys.readouterr().out == "! rank 1 died\n" and kept == []


def test_an_error_of_a_handler_is_printed_and_raised_nowhere(kept, capsys):
    class Fails(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the log server is gone")

    fails = Fails()
    LOGGER.addHandler(fails)
    say("! rank 1 died")
    LOGGER.removeHandler(fails)
    printed = capsys.readouterr()
    assert printed.out == "! rank 1 died\n" and "OSError: the log server is gone" in printed.err


def test_no_other_logger_below_ecrm_makes_records_without_rank_and_step():
    files = [*(ROOT / "ecrm").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    made = {
        (file.name, name)
        for file in files
        for name in re.findall(r"getLogger\(([^)]*)\)", file.read_text())
    }
    own = {pair for pair in made if "torch" not in pair[1]}
    assert own == {("log.py", '"ecrm"')}


def test_the_root_logger_does_not_print_the_lines_again(kept, capsys):
    root = Kept()
    logging.getLogger().addHandler(root)
    say("! rank 1 died")
    logging.getLogger().removeHandler(root)
    assert len(kept) == 1 and root.records == []


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_leaves_lines_off_the_terminal_and_not_out_of_handlers(kept, capsys, name):
    print_from({"ECRM_LOG": name.upper()})
    lines = {"info": "step 5", "warning": "! rank 1 died", "error": "ecrm: error: no room"}
    for line in lines.values():
        say(line)
    assert len(kept) == 3
    wanted = [line for level, line in lines.items() if LEVELS[level] >= LEVELS[name]]
    assert capsys.readouterr().out.splitlines() == wanted


def test_an_unknown_level_is_refused_with_the_words_to_type():
    with pytest.raises(UsageError, match="type ECRM_LOG= with one of info, warning, error"):
        print_from({"ECRM_LOG": "loud"})
    done = ecrm("config", env={**os.environ, "ECRM_LOG": "loud"})
    assert done.returncode == 2
    assert done.stderr.startswith("ecrm: error: ECRM_LOG is loud, which is no level")

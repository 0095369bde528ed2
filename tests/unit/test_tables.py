"""The tables in README and docs match the committed CSV files; stale ones are reported."""

import re
import shutil
import subprocess

import pytest

from support.benchmarking import program
from support.paths import ROOT

RESULTS = "docs/benchmarks/results.md"


@pytest.fixture
def tables():
    return program("lib.tables")


@pytest.fixture
def project(tmp_path):
    """README, docs and results of this project, to be changed."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    return tmp_path


def test_committed_documents_equal_their_csv_files(tables, capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out
    names = [
        mark["name"]
        for path in tables.documents(ROOT)
        for mark in tables.MARK.finditer(path.read_text())
        if mark["name"]
    ]
    assert {"recovery", "scrub", "checkpoint"} <= set(names)


def test_a_changed_number_is_found_named_and_put_right(tables, project, capsys):
    page = project / RESULTS
    before = page.read_text()
    page.write_text(re.sub(r"\| `async` \| 272", "| `async` | 273", before))
    assert tables.main(["--check", "--root", str(project)]) == 1
    said = capsys.readouterr()
    assert said.out == f"{RESULTS}: table checkpoint differs from its CSV\n"
    assert "python benchmarks/publish.py" in said.err
    assert tables.main(["--root", str(project)]) == 0
    assert page.read_text() == before
    assert tables.main(["--check", "--root", str(project)]) == 0


def test_without_its_csv_a_table_says_so(tables, project):
    (project / "benchmarks" / "results" / "scrub.csv").unlink()
    assert tables.main(["--root", str(project)]) == 0
    text = (project / RESULTS).read_text()
    assert (
        "<!-- table: scrub -->\n\nNot measured yet: there is no "
        "benchmarks/results/scrub.csv.\n\n<!-- end -->" in text
    )


@pytest.mark.parametrize(
    "text, told",
    [
        (
            "<!-- table: scrubbing -->\n<!-- end -->\n",
            "README.md: there is no table scrubbing: only ",
        ),
        ("<!-- table: scrub -->\n", "README.md: the table scrub has no <!-- end -->"),
        ("x\n<!-- end -->\n", "README.md: line 2: <!-- end --> ends no table"),
        (
            "<!-- table: scrub -->\n<!-- table: scrub -->\n<!-- end -->\n",
            "README.md: line 2: <!-- table: scrub --> within the table scrub",
        ),
    ],
)
def test_marks_that_make_no_sense_are_told_in_one_line_and_nothing_is_written(
    tables, project, capsys, text, told
):
    (project / "README.md").write_text(text)
    (project / RESULTS).write_text("<!-- table: scrub -->\n<!-- end -->\n")
    assert tables.main(["--root", str(project)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(told) and said.count("\n") == 1
    assert (project / RESULTS).read_text() == "<!-- table: scrub -->\n<!-- end -->\n"


@pytest.mark.parametrize(
    "content, told",
    [
        ("", "has no rows"),
        (
            "rows_per_step,ratio_to_0\n0,1.0\n400,1.1\n",
            "does not give the table scrub: KeyError 'bytes_per_server_and_step'",
        ),
        ("rows_per_step,ratio_to_0\n0,fast\n", "does not give the table scrub: ValueError"),
    ],
)
def test_a_csv_that_makes_no_sense_is_told_in_one_line(tables, project, capsys, content, told):
    (project / "benchmarks" / "results" / "scrub.csv").write_text(content)
    assert tables.main(["--root", str(project)]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


def test_medians_least_and_greatest(tables):
    fields = (
        "gap_ms",
        "recovery_ms",
        "step_ms",
        "redone_steps",
        "samples_per_second_before",
        "samples_per_second_during",
        "samples_per_second_after",
        "rebuild_seconds",
    )
    rows = [
        dict.fromkeys(fields, 7) | {"scenario": "server", "gap_ms": gap}
        for gap in (30.0, 10.0, 2000.0)
    ]
    assert (
        tables.recovery(rows)[-1] == "| server | 30 (10 to 2,000) | 7 | 7 | 7 | 7 | 7 | 7 | 7.00 |"
    )


def test_rows_of_a_former_contender_are_left_out(tables):
    rows = [
        {"regime": "one", "contender": name, "step_ms": 2, "samples_per_second": 8}
        for name in ("none", "none-fbgemm")
    ]
    assert tables.step(rows)[2:] == ["| one | none | 2.0 | 8 |"]


def test_a_page_shows_where_its_numbers_come_from_and_leads_to_its_figures(tables, project):
    text = (project / RESULTS).read_text()
    assert re.search(r"\n\*scrub\.csv: .*2 cores, torch .*, commit \w+\*\n", text)
    assert "(../figures/scrub.png)" in text


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_csv_of_another_benchmark_does_not_make_the_code_another_one(tmp_path, monkeypatch):
    """`make bench` runs one benchmark after the other, and each names the commit."""
    measure = program("lib.measure")
    code, csv = tmp_path / "benchmarks/lib/measure.py", tmp_path / "benchmarks/results/step.csv"
    for file in (code, csv):
        file.parent.mkdir(parents=True)
        file.write_text("before")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        name = ["-c", "user.name=nobody", "-c", "user.email=nobody@nowhere"]
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(measure, "__file__", str(code))
    clean = measure.commit.__wrapped__()
    csv.write_text("after")
    assert measure.commit.__wrapped__() == clean and clean.isalnum()
    code.write_text("after")
    assert measure.commit.__wrapped__() == f"{clean}-dirty"

"""The committed figures match the committed CSV files; missing or stale ones are reported."""

import re
import shutil

import pytest

from support.benchmarking import program
from support.paths import ROOT

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def figures():
    return program("lib.figures")


@pytest.fixture
def project(tmp_path):
    """A folder with two of the results, to be changed."""
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for name in ("recovery.csv", "scrub.csv"):
        shutil.copy(ROOT / "benchmarks" / "results" / name, tmp_path / "benchmarks" / "results")
    return tmp_path


def test_committed_figures_are_of_their_csv_files(figures, capsys):
    assert figures.main(["--check"]) == 0, capsys.readouterr().out


def test_every_picture_in_the_documents_is_there():
    linked = [
        path.parent / link
        for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", path.read_text())
    ]
    assert {"recovery.png", "scrub.png", "checkpoint.png"} <= {path.name for path in linked}
    assert not [str(path) for path in linked if not path.is_file()]


def test_a_figure_is_drawn_from_its_csv_alone(figures, project, capsys):
    assert figures.main(["--root", str(project)]) == 0
    said = capsys.readouterr().out
    assert "figure checkpoint left out: there is no benchmarks/results/checkpoint.csv\n" in said
    assert sorted(path.name for path in (project / "docs" / "figures").iterdir()) == [
        "recovery.png",
        "scrub.png",
    ]
    assert figures.main(["--check", "--root", str(project)]) == 0

    first = (project / "docs" / "figures" / "scrub.png").read_bytes()
    csv = project / "benchmarks" / "results" / "scrub.csv"
    csv.write_text("".join(csv.read_text().splitlines(keepends=True)[:-1]))
    capsys.readouterr()
    assert figures.main(["--check", "--root", str(project)]) == 1
    assert "docs/figures/scrub.png was drawn from another CSV\n" in capsys.readouterr().out
    assert figures.main(["--root", str(project)]) == 0
    assert figures.main(["--check", "--root", str(project)]) == 0
    assert (project / "docs" / "figures" / "scrub.png").read_bytes() != first


def test_a_csv_without_a_column_is_told_in_one_line(figures, project, capsys):
    csv = project / "benchmarks" / "results" / "recovery.csv"
    csv.write_text(csv.read_text().replace("gap_ms", "gap", 1))
    assert figures.main(["--root", str(project)]) == 2
    said = capsys.readouterr().err
    assert (
        "recovery.csv does not give the figure recovery: KeyError 'gap_ms'" in said
        and said.count("\n") == 1
    )
    assert not (project / "docs" / "figures" / "recovery.png").exists()

"""The packages of ECRM: ranges, the tested set, and one line where a package is missing."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import ecrm
from ecrm.base import requirements
from ecrm.base.errors import UsageError
from ecrm.base.requirements import TORCHREC, fbgemm_of, require_torchrec
from ecrm.cli.commands import main
from ecrm.launch import watch
from ecrm.launch.doctor import FINDINGS
from support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = {
    canonicalize_name(wanted.name): wanted
    for name, group in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items()
    if name != "deploy"  # installed by .ci/versions alone
    for wanted in map(Requirement, group)
}
LOCKED = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(
        r"^(\S+)==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE
    )
}
IMPORTED_BY_TORCHREC = {"iopath", "pyre-extensions", "tensordict", "torchmetrics", "tqdm"}


def read(file: str) -> str:
    return (ROOT / file).read_text()


def without(monkeypatch, package: str) -> None:
    """Let a package look as if it were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == package else find(name)
    )


def installed(monkeypatch, **versions: str) -> None:
    """Let packages look as if they were installed in other versions."""
    found = metadata.version
    given = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(
        requirements.metadata, "version", lambda name: given.get(name) or found(name)
    )


@pytest.mark.parametrize("name", [*ecrm.__all__, "nn"])
def test_a_session_without_torchrec_is_refused_with_the_command(monkeypatch, name):
    without(monkeypatch, "torchrec")
    monkeypatch.delitem(vars(ecrm), name, raising=False)  # where another test has imported a module
    with pytest.raises(UsageError) as caught:
        getattr(ecrm, name)
    assert str(caught.value) == f"TorchRec is not installed: type {TORCHREC}"
    assert ecrm.ops.__name__ == "ecrm.ops"


@pytest.mark.parametrize("command", ["launch", "train", "drill"])
def test_a_script_without_torchrec_is_refused_before_the_start(
    monkeypatch, tmp_path, capsys, command
):
    (tmp_path / "script.py").write_text("raise SystemExit('never run')\n")
    without(monkeypatch, "torchrec")
    assert main([command, str(tmp_path / "script.py")]) == 2
    said = capsys.readouterr().err
    assert said == f"ecrm: error: TorchRec is not installed: type {TORCHREC}\n"


def test_the_doctor_says_whether_sessions_can_run(monkeypatch):
    assert list(FINDINGS["scripts"]()) == ["ecrm.Session can run"]
    without(monkeypatch, "torchrec")
    (said,) = FINDINGS["scripts"]()
    assert said.startswith("ecrm.Session cannot run: ") and said.endswith(TORCHREC)


def test_a_config_without_torchrec_is_refused_with_the_same_command(monkeypatch, capsys):
    without(monkeypatch, "torchrec")
    assert main(["launch", "tiny", "--dry-run", "--set", "data.path=absent"]) == 2
    said = f"ecrm: error: TorchRec is not installed: type {TORCHREC}\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "torch, fbgemm, wanted",
    [("2.11.0+cu130", "1.8.0", "1.6"), ("2.14.1", "1.8.0", "1.9"), ("2.8.0+cpu", "1.9.0", "1.3")],
)
def test_an_fbgemm_of_another_torch_is_refused_with_the_right_one(
    monkeypatch, torch, fbgemm, wanted
):
    installed(monkeypatch, torch=torch, fbgemm_gpu_cpu=fbgemm)
    with pytest.raises(UsageError) as caught:
        require_torchrec()
    assert str(caught.value) == (
        f"fbgemm-gpu-cpu {fbgemm} cannot load with torch {torch}: "
        f"type pip install 'fbgemm-gpu-cpu=={wanted}.*'"
    )
    installed(monkeypatch, torch=torch, fbgemm_gpu_cpu=f"{wanted}.7")
    require_torchrec()


@pytest.mark.parametrize("torch", ["2.13.0a0+git12ab", "2.15.0.dev20261001", "3.0.0"])
def test_a_torch_that_is_no_release_is_left_to_fbgemm(monkeypatch, torch):
    installed(monkeypatch, torch=torch, fbgemm_gpu_cpu="1.0.0")
    require_torchrec()


def test_a_range_is_open_within_one_major_version_and_the_tested_set_lies_in_it():
    for name, wanted in NEEDED.items():
        operators = {one.operator for one in wanted.specifier}
        assert operators in ({">=", "<"}, {">="}, set()), name
        assert LOCKED[name] in wanted.specifier, name
    for wanted in map(Requirement, PROJECT["dependencies"]):
        assert {one.operator for one in wanted.specifier} == {">=", "<"}, wanted.name
    assert {canonicalize_name(Requirement(each).name) for each in PROJECT["dependencies"]} >= (
        IMPORTED_BY_TORCHREC
    )


def test_heavy_packages_that_training_can_do_without_are_extras():
    needed = {Requirement(each).name for each in PROJECT["dependencies"]}
    for heavy in ("matplotlib", "rich", "tensorboard"):
        assert heavy not in needed
        assert [Requirement(each).name for each in PROJECT["optional-dependencies"][heavy]] == [
            heavy
        ]


def test_torch_and_fbgemm_fit_each_other_in_the_tested_set_and_at_both_ends_of_the_ranges():
    assert fbgemm_of(str(LOCKED["torch"])) == ".".join(str(LOCKED["fbgemm-gpu-cpu"]).split(".")[:2])
    ends = {
        name: {one.operator: one.version for one in NEEDED[name].specifier}
        for name in ("torch", "fbgemm-gpu-cpu")
    }
    for end in (">=", "<"):
        assert fbgemm_of(f"{ends['torch'][end]}.0") == ends["fbgemm-gpu-cpu"][end]


def test_the_tested_torchrec_is_one_that_the_command_installs():
    (wanted,) = re.findall(r"'(.+)'", TORCHREC)
    assert LOCKED["torchrec"] in Requirement(wanted).specifier


@pytest.mark.parametrize("file", ["README.md", "docs/operations/install.md"])
def test_a_page_has_the_command_that_the_error_repeats(file):
    assert re.findall(r"^    (pip install --no-deps .*?)(?: *#.*)?$", read(file), re.MULTILINE) == [
        TORCHREC
    ]


@pytest.mark.parametrize("file", ["Dockerfile", ".ci/versions"])
def test_a_program_installs_the_same_torchrec(file):
    (wanted,) = re.findall(r"'(.+)'", TORCHREC)
    assert re.findall(r"--no-deps '(.+?)'", read(file)) == [wanted]


def test_the_page_shows_the_error_of_an_unfit_fbgemm(monkeypatch):
    installed(monkeypatch, torch="2.13.0", fbgemm_gpu_cpu="1.9.0")
    with pytest.raises(UsageError) as caught:
        require_torchrec()
    assert f"ecrm: error: {caught.value}\n" in read("docs/operations/install.md")


def test_every_extra_of_users_is_on_the_page():
    page = read("docs/operations/install.md")
    for extra in {*PROJECT["optional-dependencies"]} - {"test", "lint", "wheel", "docs", "deploy"}:
        assert f"pip install 'ecrm[{extra}]'" in page


def test_the_script_of_the_readme_has_twenty_lines():
    (script,) = re.findall(r"^```python\n(.*?)^```$", read("README.md"), re.DOTALL | re.MULTILINE)
    assert len(script.splitlines()) == 20


def test_without_rich_a_terminal_has_a_line_instead_of_the_screen(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    without(monkeypatch, "rich")
    watch.watch_of(tmp_path, steps=10, ranks=3)
    assert capsys.readouterr().out == (
        "# no screen without the package rich: type pip install 'ecrm[rich]'\n"
    )


def test_readme_names_the_range_of_torch():
    (oldest,) = (each.version for each in NEEDED["torch"].specifier if each.operator == ">=")
    (end,) = (each.version for each in NEEDED["torch"].specifier if each.operator == "<")
    newest = f"2.{Version(end).minor - 1}"
    assert f"torch {oldest} to {newest} and TorchRec 1.7 or newer" in read("README.md")
    assert "torchrec>=1.7" in TORCHREC

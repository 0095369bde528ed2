"""The layers that import-linter checks are shown in CONTRIBUTING, and the rooms stay few."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from graphlib import TopologicalSorter

import grimp

from support.paths import ROOT

MOST_ROOMS, MOST_FLOORS = 25, 12
"""Folders and single files directly below ecrm/, and the longest chain of imports among them."""


@cache
def imports() -> Mapping[str, set[str]]:
    """The modules that each module imports, late imports included, without those for types."""
    graph = grimp.build_graph("ecrm", exclude_type_checking_imports=True)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_no_module_imports_itself_through_others():
    TopologicalSorter(imports()).prepare()  # raises CycleError with the circle


def test_rooms_and_floors_stay_few():
    among: dict[str, set[str]] = {}
    for module, imported in imports().items():
        rooms = {room_of(name) for name in imported} - {room_of(module), ""}
        among.setdefault(room_of(module), set()).update(rooms)
    del among[""]
    floors: dict[str, int] = {}
    for room in TopologicalSorter(among).static_order():
        floors[room] = 1 + max((floors[below] for below in among[room]), default=0)
    assert len(among) <= MOST_ROOMS and max(floors.values()) <= MOST_FLOORS, floors


def test_the_product_imports_no_test_double():
    doubles = {
        module
        for module, imported in imports().items()
        if room_of(module) != "testing" and any(room_of(name) == "testing" for name in imported)
    }
    assert doubles == {"ecrm.cli.commands"}, "which has `ecrm simulate` where the part is there"


def test_contributing_shows_the_layers_of_the_contract():
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    rows = re.findall(
        r"^\| (\d*) ?\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    shown: list[list[str]] = []
    for number, part in rows:
        if number:
            assert int(number) == len(shown) + 1
            shown.append([])
        shown[-1].append(part)
    assert shown == [layer.split(" | ") for layer in contract["layers"]]

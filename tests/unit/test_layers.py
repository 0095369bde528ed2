"""The layers that import-linter checks are those that CONTRIBUTING shows, and kernels are below them."""

import ast
import re
import tomllib

from support.paths import ROOT


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


def test_kernels_import_no_other_part():
    """import-linter does not see them: they lie outside the folder ecrm/."""
    files = list((ROOT / "kernels").rglob("*.py"))
    imported = {
        name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        if name.split(".")[0] == "ecrm"
    }
    assert "ecrm.kernels" in imported
    assert [name for name in imported if not name.startswith("ecrm.kernels")] == []

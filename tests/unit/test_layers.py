"""The layers that import-linter checks are those that CONTRIBUTING shows."""

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

"""Whether all ranks were started with the same data and config. Pure.

On several hosts each rank reads its own files.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecrm.config.schema import Config

DATA, STEPS = "data", "number of steps"
_OF_DATA = ("rows", "tables", "files")  # of the manifest; the sources may have had other names
_SHOWN = 8


@dataclass(frozen=True)
class Given:
    """What one rank was started with: its host, and digests of its data and config.

    The digests are SHA-256 of the data, of every config key but data.path, and of the number of
    steps.
    """

    host: str
    digests: Mapping[str, str]


def given(host: str, config: Config, manifest: Mapping[str, Any], steps: int) -> Given:
    """What a rank has, by its config and by the `manifest` of its dataset.

    data.path may differ where the data does not.
    """
    keys = {
        f"{section}.{key}": value
        for section, values in config.to_dict().items()
        for key, value in values.items()
    }
    del keys["data.path"]
    parts = {DATA: {name: manifest[name] for name in _OF_DATA}, **keys, STEPS: steps}
    return Given(host, {name: _digest(part) for name, part in parts.items()})


def unlike(ranks: Mapping[int, Given]) -> str | None:
    """Which ranks have something other than most, and what; None where all have the same."""
    kinds = {rank: tuple(sorted(ranks[rank].digests.items())) for rank in sorted(ranks)}
    # of equally many the one of the lowest rank
    (most, _), *others = Counter(kinds.values()).most_common()
    if not others:
        return None
    usual = next(rank for rank, kind in kinds.items() if kind == most)
    said = []
    for kind, _ in others:
        those = [rank for rank in kinds if kinds[rank] == kind]
        said.append(
            f"{_named(those, ranks)} {'has' if len(those) == 1 else 'have'} "
            f"{_difference(dict(kind), dict(most))}"
        )
    more = f"; {len(said) - _SHOWN} more differ in another way" if len(said) > _SHOWN else ""
    return (
        f"not all ranks have the same data and config: unlike {_named([usual], ranks)}, "
        f"{'; '.join(said[:_SHOWN])}{more}: "
        "copy the prepared data and the config to every host"
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _difference(other: Mapping[str, str], usual: Mapping[str, str]) -> str:
    names = [name for name in {**usual, **other} if other.get(name) != usual.get(name)]
    keys = sorted(name for name in names if name not in (DATA, STEPS))
    parts = ["other data"] if DATA in names else []
    if keys:
        parts.append(f"another config ({_cut(keys)})")
    return " and ".join(parts) or "another number of steps"


def _named(those: Sequence[int], ranks: Mapping[int, Given]) -> str:
    hosts = sorted({ranks[rank].host for rank in those})
    numbers = _cut([str(rank) for rank in those])
    return f"rank{'' if len(those) == 1 else 's'} {numbers} on {_cut(hosts)}"


def _cut(words: Sequence[str]) -> str:
    return ", ".join(words[:_SHOWN]) + (
        f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    )

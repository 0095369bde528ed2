"""Check that all ranks were started with the same data and config. Pure.

On several hosts each rank reads its own files.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecrm.base.wording import MOST_SHOWN
from ecrm.config.schema import Config

STEPS = "number of steps"
MAY_DIFFER = ("data.path", "storage.device", "kernels.backend", "testing.imitated_gpu")
"""Config keys allowed to differ between ranks: no bits depend on the values."""


@dataclass(frozen=True)
class InputDigests:
    """The inputs of one rank at the start: its host, and digests by name.

    Digested with SHA-256 are all config keys outside MAY_DIFFER, by "section.key", the number of
    STEPS, and further inputs required to be equal on all ranks.
    """

    host: str
    digests: Mapping[str, str]


@dataclass(frozen=True)
class Alike:
    """The inputs required to be equal besides the config, in words for a message.

    `things` names all equal inputs, such as "data and config"; `others` names each input with a
    digest of its own when different, such as "other data"; `remedy` says how to make the inputs
    equal.
    """

    things: str
    others: Mapping[str, str]
    remedy: str


def given_of(host: str, config: Config, steps: int, **others: Any) -> InputDigests:
    """The inputs of a rank: its config, its number of steps, and `others`, JSON values by name."""
    keys = {
        f"{section}.{key}": value
        for section, values in config.to_dict().items()
        for key, value in values.items()
        if f"{section}.{key}" not in MAY_DIFFER
    }
    parts = {**others, **keys, STEPS: steps}
    return InputDigests(host, {name: _digest(part) for name, part in parts.items()})


def unlike(ranks: Mapping[int, InputDigests], alike: Alike) -> str | None:
    """Name the ranks different from most ranks, and the differences; `None` if all are equal."""
    kinds = {rank: tuple(sorted(ranks[rank].digests.items())) for rank in sorted(ranks)}
    # among equally frequent kinds the kind of the lowest rank
    (most, _), *others = Counter(kinds.values()).most_common()
    if not others:
        return None
    usual = next(rank for rank, kind in kinds.items() if kind == most)
    said = []
    for kind, _ in others:
        those = [rank for rank in kinds if kinds[rank] == kind]
        said.append(
            f"{_named(those, ranks)} {'has' if len(those) == 1 else 'have'} "
            f"{_difference(dict(kind), dict(most), alike.others)}"
        )
    more = (
        f"; {len(said) - MOST_SHOWN} more differ in another way" if len(said) > MOST_SHOWN else ""
    )
    return (
        f"not all ranks have the same {alike.things}: unlike {_named([usual], ranks)}, "
        f"{'; '.join(said[:MOST_SHOWN])}{more}: {alike.remedy}"
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _difference(
    other: Mapping[str, str], usual: Mapping[str, str], words: Mapping[str, str]
) -> str:
    names = [name for name in {**usual, **other} if other.get(name) != usual.get(name)]
    keys = sorted(name for name in names if name not in (*words, STEPS))
    parts = [word for name, word in words.items() if name in names]
    if keys:
        parts.append(f"another config ({_cut(keys)})")
    return " and ".join(parts) or "another number of steps"


def _named(those: Sequence[int], ranks: Mapping[int, InputDigests]) -> str:
    hosts = sorted({ranks[rank].host for rank in those})
    numbers = _cut([str(rank) for rank in those])
    return f"rank{'' if len(those) == 1 else 's'} {numbers} on {_cut(hosts)}"


def _cut(words: Sequence[str]) -> str:
    return ", ".join(words[:MOST_SHOWN]) + (
        f" and {len(words) - MOST_SHOWN} more" if len(words) > MOST_SHOWN else ""
    )

"""The keys of a config as text: the reference of all keys, and the values of one config."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from ecrm.config.check import TYPE_WORDS, TYPES, show
from ecrm.config.schema import REQUIRED, SECTIONS, Config, Rule

COLUMNS = 100


@dataclasses.dataclass(frozen=True)
class Key:
    """One key in the reference.

    `wanted` is the key's type or range, `default` is None if the key is required.
    """

    name: str
    rule: Rule
    wanted: str
    default: str | None


def keys_of(section: str) -> Iterator[Key]:
    """The keys of a section, in order."""
    for field in dataclasses.fields(SECTIONS[section]):
        rule: Rule = field.metadata["rule"]
        wanted = rule.wanted() or TYPE_WORDS[TYPES[section][field.name]]
        default = None if field.default is REQUIRED else show(field.default)
        yield Key(field.name, rule, wanted, default)


def reference() -> str:
    """All keys with type, range and meaning, as a TOML file with the defaults."""
    blocks = []
    for section, kind in SECTIONS.items():
        lines = [*_comment(kind.__doc__ or ""), f"[{section}]"]
        for key in keys_of(section):
            meanings = [f"{choice}: {text}" for choice, text in key.rule.choices.items() if text]
            lines += ["", *_comment(f"{key.rule.description} ({key.wanted})")]
            lines += [line for meaning in meanings for line in _comment(meaning, indent=2)]
            setting = f"{key.name} = {key.default}"
            lines.append(f"# {key.name} = (required)" if key.default is None else setting)
        blocks.append("\n".join(lines))
    return "\n\n\n".join(blocks) + "\n"


def effective(config: Config | Mapping[str, Mapping[str, Any]]) -> str:
    """The values of a config, or of some sections, as TOML text that loads to the same values."""
    blocks = []
    for name, values in (config.to_dict() if isinstance(config, Config) else config).items():
        blocks.append(
            "\n".join([f"[{name}]", *(f"{key} = {show(value)}" for key, value in values.items())])
        )
    return "\n\n".join(blocks) + "\n"


def _comment(text: str, indent: int = 0) -> list[str]:
    first = "# " + " " * indent
    further = first + " " * indent
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )

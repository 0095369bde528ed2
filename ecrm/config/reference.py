"""The keys of a config as text: the reference of all keys, and the effective values of one config."""

from __future__ import annotations

import dataclasses

from ecrm.config.check import TYPE_WORDS, TYPES, show
from ecrm.config.schema import REQUIRED, SECTIONS, Config


def reference() -> str:
    """All keys with type, range and meaning, as a TOML file that holds the defaults."""
    blocks = []
    for name, section in SECTIONS.items():
        lines = [f"# {section.__doc__}", f"[{name}]"]
        for field in dataclasses.fields(section):
            rule = field.metadata["rule"]
            wanted = rule.wanted() or TYPE_WORDS[TYPES[name][field.name]]
            lines.append(f"# {rule.description} ({wanted})")
            lines.append(
                f"# {field.name} = (required)"
                if field.default is REQUIRED
                else f"{field.name} = {show(field.default)}"
            )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def effective(config: Config) -> str:
    """The values of `config` as TOML text that loads to the same config."""
    blocks = []
    for name, values in config.to_dict().items():
        blocks.append(
            "\n".join([f"[{name}]", *(f"{key} = {show(value)}" for key, value in values.items())])
        )
    return "\n\n".join(blocks) + "\n"

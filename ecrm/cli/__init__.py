"""The `ecrm` command: its subcommands and their options. Imports nothing heavy."""

from ecrm.cli.commands import main

__all__ = ["main"]

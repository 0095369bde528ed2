"""The `ecrm` command with subcommands and options. Imports nothing heavy."""

from ecrm.cli.commands import main

__all__ = ["main"]

"""State in memory-mapped files, valid after any kill, for `protection.name = "mapped"`."""

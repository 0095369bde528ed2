"""State in memory-mapped files that are valid after any kill, for `protection.name = "mapped"`."""

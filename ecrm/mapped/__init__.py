"""State in memory-mapped files that are right after any kill: what `protection.name = "mapped"` is made of."""

"""A run before and after the life of its ranks: plan, start, and run folder."""

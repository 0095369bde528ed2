"""A rank as a process: guarded, started, stopped, and never left behind."""

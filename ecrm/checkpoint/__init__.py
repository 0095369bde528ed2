"""Checkpoints on disk, from which a run goes on after losses beyond its protection."""

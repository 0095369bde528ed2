"""Checkpoints: what a run leaves on disk so that it can go on after losing more than its protection covers, or everything."""

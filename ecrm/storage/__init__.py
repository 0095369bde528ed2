"""Rows and optimizer state of one shard, and how to undo a step."""

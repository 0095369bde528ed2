"""Requests of slots to shards, and replies, as messages. Below protections and the engine."""

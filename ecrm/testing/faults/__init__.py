"""Faults injected on purpose. A run loads the room only when a fault is asked for."""

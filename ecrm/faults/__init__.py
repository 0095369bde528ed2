"""Faults injected on purpose. Imports nothing heavy until a fault is due."""

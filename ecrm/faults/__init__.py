"""Faults that are injected on purpose. Light until one is due."""

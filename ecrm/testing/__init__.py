"""Faults on purpose, an imitated GPU and a simulated cluster. A run loads the room by name alone.

`ecrm/base/testing_part.py` loads a part when `--kill` or a key of `testing` asks for the part.
"""

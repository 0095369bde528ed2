"""Numbers with their nouns, as messages have them. Light: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_SHOWN = 8
"""The most things that a message lists."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """A count and what is counted, such as "1 rank" or "1,024 ranks".

    `plural` is for nouns that do not just take an s.
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def named(noun: str, which: Iterable[object]) -> str:
    """Things by number or name, such as "rank 3" or "ranks 3, 5"."""
    names = [str(one) for one in which]
    return f"{noun}{'' if len(names) == 1 else 's'} {', '.join(names)}"


def listed(lines: Sequence[str]) -> str:
    """The first of several things that differ, and how many more there are."""
    more = f"; and {len(lines) - MOST_SHOWN} more" if len(lines) > MOST_SHOWN else ""
    return "; ".join(lines[:MOST_SHOWN]) + more


def duration(seconds: float) -> str:
    """A duration such as "12s", "3m05s" or "1h02m"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def survives_in_words(failures: int) -> str:
    """How many more failures a run can survive."""
    return f"can survive {failures:,} more at once"

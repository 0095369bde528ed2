"""Numbers with their nouns, for messages. Light: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_SHOWN = 8
"""The most things listed by a message."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun, such as "1 rank" or "1,024 ranks".

    `plural` is for nouns with a plural other than an added s.
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def named(noun: str, which: Iterable[object]) -> str:
    """Things by number or name, such as "rank 3" or "ranks 3, 5"."""
    names = [str(one) for one in which]
    return f"{noun}{'' if len(names) == 1 else 's'} {', '.join(names)}"


def listed(lines: Sequence[str]) -> str:
    """The first MOST_SHOWN of several lines, and the number of further lines."""
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
    """The number of further failures that a run can survive, in words."""
    return f"can survive {failures:,} more at once"


def measured(value: float | None) -> str:
    """A measured value for a line; "-" for an undefined value."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"

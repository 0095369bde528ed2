"""State hidden from the engine by a drawn script. A session must refuse the script.

The script's results depend on the hidden state, so a redone step would give different results.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Counting(dict[str, int]):
    """A subclass of dict, defined by the script."""


def _counted(module: Any) -> float:
    module.calls = getattr(module, "calls", 0) + 1
    return float(module.calls)


def _kept(module: Any, kind: Callable[[], Any]) -> float:
    """The number of calls, counted in a mapping on the module."""
    if not hasattr(module, "kept"):
        module.kept = kind()
    module.kept["calls"] = module.kept.get("calls", 0) + 1
    return float(module.kept["calls"])


def _remembered(module: Any, kind: Callable[[], Any]) -> float:
    """The number of calls, as the length of a sequence on the module."""
    if not hasattr(module, "seen"):
        module.seen = kind()
    module.seen.append(len(module.seen))
    return float(len(module.seen))


def _drawn(module: Any, make: Callable[[], Any], draw: Callable[[Any], float]) -> float:
    """A number drawn from a random generator on the module."""
    if not hasattr(module, "noise"):
        module.noise = make()
    return draw(module.noise)


HIDDEN: dict[str, Callable[[nn.Module], float]] = {
    "a counter": _counted,
    "a dict": lambda module: _kept(module, dict),
    "a Counter": lambda module: _kept(module, Counter),
    "an OrderedDict": lambda module: _kept(module, OrderedDict),
    "a defaultdict": lambda module: _kept(module, lambda: defaultdict(int)),
    "a dict of its own class": lambda module: _kept(module, Counting),
    "a list": lambda module: _remembered(module, list),
    "a deque": lambda module: _remembered(module, deque),
    "a generator of torch": lambda module: _drawn(
        module,
        lambda: torch.Generator().manual_seed(1),
        lambda noise: float(torch.rand((), generator=noise)),
    ),
    "a generator of numpy": lambda module: _drawn(
        module, lambda: np.random.default_rng(1), lambda noise: float(noise.random())
    ),
    "a generator of Python": lambda module: _drawn(
        module, lambda: random.Random(1), lambda noise: noise.random()
    ),
}
"""Kinds of hidden state by name; every function gives a number that differs from call to call."""


def hide(module: nn.Module, kind: str) -> None:
    """Make a module's results depend on hidden state of a kind of `HIDDEN`.

    Every call changes the state.
    """
    number = HIDDEN[kind]

    def depend(module: nn.Module, _: Any, result: Tensor) -> Tensor:
        return result * (1 + number(module) / 64)

    module.register_forward_hook(depend)

"""State that a drawn script hides from the engine, on which its results depend: to be refused."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Counting(dict[str, int]):
    """A dict of a class of the script's own."""


def _counted(module: Any) -> float:
    module.calls = getattr(module, "calls", 0) + 1
    return float(module.calls)


def _kept(module: Any, kind: Callable[[], Any]) -> float:
    """A mapping on the module counts the calls."""
    if not hasattr(module, "kept"):
        module.kept = kind()
    module.kept["calls"] = module.kept.get("calls", 0) + 1
    return float(module.kept["calls"])


def _remembered(module: Any, kind: Callable[[], Any]) -> float:
    """A sequence on the module has an entry for each call."""
    if not hasattr(module, "seen"):
        module.seen = kind()
    module.seen.append(len(module.seen))
    return float(len(module.seen))


def _drawn(module: Any, make: Callable[[], Any], draw: Callable[[Any], float]) -> float:
    """A generator of random numbers on the module is drawn from."""
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
"""Kinds of hidden state: each gives a number that differs from call to call."""


def hide(module: nn.Module, kind: str) -> None:
    """Have a module's results depend on state of a kind of `HIDDEN`, which each call changes."""
    number = HIDDEN[kind]

    def depend(module: nn.Module, _: Any, result: Tensor) -> Tensor:
        return result * (1 + number(module) / 64)

    module.register_forward_hook(depend)

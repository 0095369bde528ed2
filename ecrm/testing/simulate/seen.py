"""Observations of a simulated session's script, compared with the undisturbed run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ecrm.testing.simulate.promise import Violation

Logged = Mapping[int, Mapping[str, float]]


@dataclass
class Seen:
    """The observations of the script on one rank.

    `logged` has (step, logs by slot) in the order of delivery. `evaluated` maps steps to results of
    evaluations; -1 is the evaluation after the last step. `joined`: the script began in the middle
    of the run. `saved` is the sha256 of the saved model,
    or empty. `finished` is whether the rank finished the script, and `holds` whether the finished
    rank held the dense replica.
    """

    logged: list[tuple[int, Mapping[int, Mapping[str, str]]]] = field(default_factory=list)
    evaluated: dict[int, Any] = field(default_factory=dict)
    saved: str = ""
    finished: bool = False
    joined: bool = False
    holds: bool = False

    def tell(self, step: int, logged: Logged) -> None:
        """Keep the delivered logs of a step, with numbers as text: NaN is not equal to NaN."""
        in_words = {
            slot: {name: repr(value) for name, value in values.items()}
            for slot, values in logged.items()
        }
        self.logged.append((step, in_words))

    def evaluate(self, step: int, result: Any) -> None:
        """Keep the result of an evaluation. A repeated evaluation must give the same result."""
        if self.evaluated.setdefault(step, result) != result:
            raise Violation(
                f"an evaluation after step {step} gave {self.evaluated[step]}, then {result}"
            )


def check_seen(seen: Mapping[int, Seen], truth: Seen, first: Sequence[int], began: int = 0) -> None:
    """Raise Violation unless all scripts' observations agree with the undisturbed run.

    `seen` maps all ranks, dead ranks included, to observations. `truth` has the observations of the
    undisturbed run. `first` are the ranks that began with the dense replica. A resumed run began
    after `began` steps.
    """
    steps = len(truth.logged)
    evaluated = {step for step in truth.evaluated if step == -1 or step >= began}
    for rank, mine in seen.items():
        told = [step for step, _ in mine.logged]
        if told != list(range(told[0], told[0] + len(told)) if told else ()):
            raise Violation(f"rank {rank} was told what steps have logged in the order {told}")
        for step, logged in mine.logged:
            if logged != truth.logged[step][1]:
                raise Violation(
                    f"rank {rank} was told that step {step} has logged {logged}, "
                    f"it was {truth.logged[step][1]}"
                )
        for step, result in mine.evaluated.items():
            if result != truth.evaluated.get(step):
                raise Violation(
                    f"rank {rank}: the evaluation after step {step} gave {result}, "
                    f"not {truth.evaluated.get(step)}"
                )
    finished = {rank: mine for rank, mine in seen.items() if mine.finished}
    for rank, mine in finished.items():
        told = [step for step, _ in mine.logged]
        # a rank that got the dense replica after the last step was told nothing
        some = told and told[-1] != steps - 1
        whole = rank in first and not mine.joined
        if mine.holds and (some or (whole and len(told) != steps - began)):
            raise Violation(f"rank {rank} was told what steps {told} have logged, of {steps}")
        if mine.evaluated.keys() != evaluated and not (
            mine.joined and mine.evaluated.keys() <= evaluated
        ):
            raise Violation(
                f"rank {rank} has evaluated after steps {sorted(mine.evaluated)}, "
                f"not {sorted(evaluated)}"
            )
        if mine.saved != truth.saved:
            raise Violation(f"rank {rank} has saved another model")
    missing = set(range(began, steps)).difference(
        step for mine in seen.values() for step, _ in mine.logged
    )
    # what a rank was told that died and has joined is not kept
    if any(mine.joined for mine in seen.values()):
        return
    if finished and missing:
        raise Violation(f"nobody was told what steps {sorted(missing)} have logged")

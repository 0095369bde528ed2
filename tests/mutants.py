"""`make mutants`: mutants of the code, and whether the tests kill them.

A mutant is the code with one small change by cosmic-ray, such as `<` for `<=`. A test that fails
kills the mutant. Mutants are drawn from all mutants of the rooms with a seed, since all of them
would take days. No file is changed: a process of its own imports the mutant, and runs the tests of
the room until the first failure. Survivors are either explained in tests/mutants.toml, or show a
missing test.

Kills count only while the tests pass without a mutant. So the tests run alone before the mutants of
a room, after them, and after a mutant that takes too long: the machine may be too busy, or broken.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import os
import random
import signal
import sys
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(Path(sys.prefix) / "mutants"))  # cosmic-ray and its packages
EXPLAINED = ROOT / "tests" / "mutants.toml"

SCHEDULES = [
    f"tests/simulated/test_schedules.py::test_{name}[some]"
    for name in (
        "survivable_schedules_finish_with_the_oracles_bits",
        "one_fault_too_many_is_refused_or_survived_but_never_wrong",
    )
]
LAYOUT = [f"tests/unit/test_{part}.py" for part in ("placement", "table_places", "tables")]
RECOVERY = ["test_recovery_traces", "test_engine_parts", "test_ledger", "test_lost_touch"]
REDUNDANCY = ["test_protections_contract", "test_scrub", "test_chain", "test_replicate"]


def simulated(*names: str) -> list[str]:
    return [f"tests/simulated/{name}.py" for name in names]


ROOMS: dict[str, tuple[list[str], list[str]]] = {
    "placement": (
        ["ecrm/placement"],
        [
            *LAYOUT,
            "tests/unit/test_sparse_optimizers.py",
            "tests/unit/test_session_load.py",  # digests of given values
            "tests/unit/test_sizing.py",
            *SCHEDULES,
        ],
    ),
    "coding": (
        ["ecrm/protection/coding"],
        [f"tests/unit/test_coding_{part}.py" for part in ("code", "gf256", "matrix")],
    ),
    "engine": (
        ["ecrm/engine"],
        [
            *simulated(*RECOVERY, "test_replica_check", "test_agreed_stop", "test_stop"),
            "tests/unit/test_step_log.py",
            "tests/unit/test_device.py",  # the printed line of a start
            "tests/unit/test_events_registry.py",  # the words of events
            *SCHEDULES,
            *simulated("test_traffic", "test_checkpoint", "test_session"),
            *simulated("test_session_data", "test_recipe", "test_scrub"),
        ],
    ),
    "protection": (
        ["ecrm/protection"],
        [
            "tests/unit/test_protection_kinds.py",
            "tests/unit/test_advice.py",  # configs that a kind does not allow
            "tests/unit/test_config_load.py",  # the words of the refusals
            "tests/unit/test_transport_spread.py",  # rows and gradients of many slots at once
            *simulated(*REDUNDANCY),
            *SCHEDULES,
            *simulated("test_stateless", "test_mapped", "test_engine_parts"),
            *simulated("test_pooled_bags"),
        ],
    ),
    "links": (
        ["kernels/links/reference.py", "ecrm/transport/membership.py"],
        ["tests/unit/test_membership.py", "tests/unit/test_kernels_links.py"],
    ),
}
"""The files of a room, and the tests run on each mutant of the room, the quickest first."""

NOT_MUTATED = ("core/RemoveDecorator", "core/VariableInserter", "core/VariableReplacer")


@dataclass(frozen=True)
class Mutant:
    """The change number `occurrence` of an operator of cosmic-ray in a file."""

    room: str
    path: str
    operator: str
    occurrence: int
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator.removeprefix('core/')} {self.occurrence}"

    @property
    def key(self) -> str:
        """The name in tests/mutants.toml: the changed line, without the numbers that move."""
        before, after = self.lines()
        return f"{self.path}: {before.strip()} -> {after.strip()}"

    def source(self) -> str:
        """The whole file with the change."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        code = (ROOT / self.path).read_text()
        mutated: str = mutate_code(code, get_operator(self.operator)(), self.occurrence)
        return mutated

    def lines(self) -> tuple[str, str]:
        """The first changed line, before and after."""
        before, after = (ROOT / self.path).read_text().splitlines(), self.source().splitlines()
        return next(pair for pair in zip(before, after, strict=False) if pair[0] != pair[1])


def all_mutants(room: str) -> list[Mutant]:
    """The mutants of a room, also those of annotations alone."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    found = []
    for place in ROOMS[room][0]:
        files = sorted((ROOT / place).rglob("*.py")) if (ROOT / place).is_dir() else [ROOT / place]
        for file in files:
            if room == "protection" and "coding" in file.parts:
                continue
            tree = get_ast_from_path(file)
            for name in operator_names():
                operator = get_operator(name)
                if name.startswith(NOT_MUTATED) or operator.arguments():
                    continue
                nodes, changes = ast_nodes(tree), operator().mutation_positions
                places = [start for node in nodes for start, _ in changes(node)]
                for occurrence, (line, _) in enumerate(places):
                    path = str(file.relative_to(ROOT))
                    found.append(Mutant(room, path, name, occurrence, line))
    return found


def plain(code: str) -> str:
    """Code without annotations and docstrings, for a comparison."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            body[0] = ast.Pass()
    return ast.dump(tree)


def drawn(room: str, count: int, seed: str) -> list[Mutant]:
    """Some mutants of a room, in an order by the seed; fewer if the room has fewer.

    Changes of annotations and docstrings alone are left out.
    """
    rng, mutants, chosen = random.Random(f"{seed} {room}"), all_mutants(room), []
    rng.shuffle(mutants)
    for mutant in mutants:
        if len(chosen) == count:
            break
        if plain(mutant.source()) != plain((ROOT / mutant.path).read_text()):
            chosen.append(mutant)
    return chosen


class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant in place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        path = mutant.path.removesuffix(".py").replace("kernels/", "ecrm/kernels/")
        self._name = path.replace("/", ".")
        self._file, self._source = str(ROOT / mutant.path), mutant.source()

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=self._file)

    def exec_module(self, module):
        module.__file__ = self._file
        exec(compile(self._source, self._file, "exec"), module.__dict__)


def tried(mutant: Mutant | None, tests: list[str], seconds: float) -> str:
    """`killed`, `survived` or `timed out`: the tests on a mutant, in a process of its own.

    `None` for the code as it is.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            silent = os.open(os.devnull, os.O_RDWR)
            for stream in 0, 1, 2:
                os.dup2(silent, stream)
            if mutant is not None:
                sys.meta_path.insert(0, Importer(mutant))
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
            os._exit(int(pytest.main(options)))
        except BaseException:
            os._exit(2)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "survived" if status == 0 else "killed"
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timed out"


def main() -> int:
    """1 if a survivor is not explained, fewer than 90 % of a room's mutants are killed, or none is.

    1 also if the tests do not pass without a mutant.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--mutants", type=int, default=40, help="drawn in each room (default 40)")
    parser.add_argument("--seed", default="1", help="of the draw (default 1)")
    parser.add_argument("--seconds", type=float, default=300.0, help="for the tests of a mutant")
    given = parser.parse_args()
    os.chdir(ROOT)
    import torch  # noqa: F401  # once, for all processes to come

    explained = tomllib.loads(EXPLAINED.read_text()) if EXPLAINED.exists() else {}
    missing, bad = [], []
    for room in given.rooms:
        tests, counted = ROOMS[room][1], Counter[str]()

        def passes(tests: list[str] = tests, room: str = room) -> bool:
            """Whether the tests pass without a mutant, in half of a mutant's time."""
            if tried(None, tests, given.seconds / 2) == "survived":
                return True
            print(f"{room}: the tests fail, or need more than {given.seconds / 2:g} s:", flush=True)
            print(f"type --seconds {2 * given.seconds:g}, or leave the machine alone", flush=True)
            return False

        if not passes():
            return 1
        for mutant in drawn(room, given.mutants, given.seed):
            outcome = tried(mutant, tests, given.seconds)
            if outcome == "survived" and mutant.key in explained.get("equal", {}):
                outcome = "equal"
            counted[outcome] += 1
            if outcome == "survived":
                before, after = mutant.lines()
                known = mutant.key in explained.get("survived", {})
                print(f"survived{' (explained)' if known else ''}: {mutant}", flush=True)
                print(f"    {before.strip()}\n    {after.strip()}", flush=True)
                missing += [] if known else [mutant]
            elif outcome == "timed out" and not passes():
                return 1
        if not passes():
            return 1
        # a mutant that hangs is stopped by the bounds of CI
        killed = counted["killed"] + counted["timed out"]
        real = killed + counted["survived"]
        print(f"{room}: {killed} of {real} killed, {dict(counted)}, seed {given.seed}", flush=True)
        if not real or killed < 0.9 * real:
            bad.append(room)
    for mutant in missing:
        print(f"not explained in {EXPLAINED.relative_to(ROOT)}: {mutant}")
    return int(bool(missing or bad))


if __name__ == "__main__":
    sys.exit(main())

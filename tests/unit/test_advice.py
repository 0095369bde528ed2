"""The advice in every refusal is followed, and the config is then accepted."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import ecrm
from ecrm.base import version_set
from ecrm.base.errors import UsageError
from ecrm.checkpoint import compatibility
from ecrm.checkpoint.compatibility import identity
from ecrm.checkpoint.folder import FOLDER, CheckpointFolder
from ecrm.checkpoint.manifest import Manifest
from ecrm.checkpoint.mapped_folder import make_folder
from ecrm.config import check, load_config
from ecrm.config.check import KEYS, check_value
from ecrm.drill.options import check_survivable, parse_disturbance
from ecrm.kernels import native
from ecrm.kernels.pieces import Piece
from ecrm.launch.memory_needs import check_memory
from ecrm.launch.scalars import require_tensorboard
from ecrm.process.device import use_device
from ecrm.protection.pooled import SummedBags
from ecrm.protection.registry import make_protection
from ecrm.protection.routing import FoundRows
from ecrm.run.claim import check_shared
from ecrm.run.connect import start_view
from ecrm.run.hello import check_version_sets, needed_versions
from ecrm.run.inputs import use_instruction_set
from ecrm.run.memory_check import judge_gpus, judged
from ecrm.run.plan import find_starting_point, kept_by, plan
from ecrm.storage import prefault
from ecrm.tables.batch_rows import BatchRows
from ecrm.tables.collections import LookedUp
from ecrm.tables.layout import Entry
from ecrm.tables.row_source import FetchedRows
from support.advice import check_advice, dataset, refusal
from support.columns import SMALL, prepared_small


def accepts(
    overrides: Sequence[str],
    config: str = "quickstart",
    resume: Path | None = None,
    init_from: Path | None = None,
) -> None:
    """As `ecrm launch` looks at a config."""
    loaded = load_config(config, overrides, kept_by(resume))
    find_starting_point(loaded, None, resume, init_from=init_from)


OF_CONFIG = [
    ["model.embedding_dim=32"],
    ["model.bottom_mlp=[64,17]"],  # no model.embedding_dim
    ["model.top_mlp=[64]"],
    ["model.architecture=dcnv2", "model.dense_arch=native"],
    ["model.max_rows_per_table=1"],
    ["train.steps=5", "train.epochs=1"],
    ["train.epochs=0"],
    ["cluster.rejoin=true", "protection.name=stateless", "checkpoint.every_steps=5"],
    ["train.slots=1"],
    ["cluster.trainers=3", "train.slots=2"],
    ["cluster.servers=4095"],
    [
        "cluster.servers=4096",
        "cluster.trainers=4096",
        "cluster.spares=4096",
        "train.global_batch=4096",
    ],
    ["cluster.layout=colocated", "cluster.servers=4096", "cluster.spares=5"],
    ["train.global_batch=1023"],
    ["train.global_batch=1"],
    ["protection.k=4"],
    ["protection.m=4"],
    ["protection.m=254", "protection.k=254"],
    ["protection.k=250", "protection.m=6", "cluster.servers=300"],
    ["protection.name=chain", "protection.copies=4", "cluster.servers=3"],
    ["protection.name=chain", "cluster.servers=1"],
    ["protection.name=replicate", "cluster.servers=1"],
    ["protection.name=none", "protection.scrub_rows_per_step=100"],
    ["protection.name=checkpoint", "checkpoint.every_minutes=0"],
    [
        "protection.name=stateless",
        "checkpoint.every_steps=9",
        "cluster.layout=colocated",
        "cluster.servers=1",
        "cluster.trainers=1",
        "cluster.spares=0",
    ],
    ["cluster.placement=tables", "protection.name=mapped"],
    ["checkpoint.keep_best=auc"],
    ["checkpoint.keep_best=auc", "train.eval_every_steps=5", "protection.name=mapped"],
    ["checkpoint.keep_best=logloss", "train.eval_every_steps=5", "data.eval_fraction=0"],
    ["train.stop_after_evaluations_without_gain=3"],
    ["testing.flip=1@row"],
    ["testing.flip=4@3:row"],
    ["testing.flip=1@30:row", "train.steps=30"],
    ["testing.flip=1@3:parity", "protection.name=none"],
    ["testing.flip=1@3:state", "train.sparse_optimizer=sgd"],
    ["testing.gpu_fault=1@3:update"],
    ["testing.gpu_fault=1@3:update:hang"],
    ["testing.imitated_gpu=true"],
    ["kernels.backend=reference"],
    ["storage.device=cuda", "storage.prefault=true"],
    ["storage.device=cuda", "protection.name=mapped"],
]


def checkpoint(folder: Path, overrides: Sequence[str], step: int = 12) -> Path:
    """A run folder with a checkpoint of no rows."""
    CheckpointFolder(folder / FOLDER).publish(
        Manifest(step, identity(load_config("tiny", overrides)), None, 0, [], [], [], [])
    )
    return folder


OF_RESUME = [
    ["train.seed=8"],
    ["train.seed=8", "train.sparse_optimizer=sgd", "model.bottom_mlp=[8,8,16]"],
    ["train.global_batch=128", "cluster.trainers=1"],
    ["train.slots=4"],
    ["train.slots=4", "cluster.trainers=4"],
    ["cluster.trainers=3"],
    ["cluster.trainers=5", "train.global_batch=65"],
    ["model.max_rows_per_table=20"],
    ["train.steps=11"],
    ["train.epochs=0.1"],
    ["data.eval_fraction=0.2"],
]


def test_every_refusal_that_gives_advice_is_refused_no_more_once_it_is_followed(
    tmp_path, monkeypatch
):
    """Goes through all of them in this process, and notes from where in the code they come."""
    seen: set[tuple[str, int]] = set()

    def note(depth: int) -> None:
        frame = sys._getframe(depth + 1)
        seen.add(
            (
                str(Path(frame.f_code.co_filename).relative_to(Path(ecrm.__file__).parent)),
                frame.f_lineno,
            )
        )

    right_problem, right_error = check._problem, UsageError.__init__

    def problem(*words):
        note(1)
        return right_problem(*words)

    def error(self, *words, **more):
        note(1)
        right_error(self, *words, **more)

    monkeypatch.setattr(check, "_problem", problem)
    monkeypatch.setattr(UsageError, "__init__", error)

    for overrides in OF_CONFIG:
        check_advice(lambda given: load_config("quickstart", given) and None, overrides)

    data = [f"data.path={dataset(tmp_path / 'data')}", "train.slots=2"]
    for overrides in (["train.global_batch=2000"], ["train.epochs=0.001"]):
        check_advice(partial(accepts, config="tiny"), [*data, *overrides])

    for share, overrides in (
        ("0.25", ["data.eval_fraction=0.2"]),
        ("0", ["checkpoint.keep_best=auc", "train.eval_every_steps=2"]),
        ("0", ["train.stop_after_evaluations_without_gain=2", "train.eval_every_steps=2"]),
    ):
        table = prepared_small(tmp_path, schema=SMALL.replace("0.25", share), force=True)
        of_table = [f"data.path={table}", "train.global_batch=2", *overrides]
        check_advice(partial(accepts, config="tiny"), of_table)

    towers = [f"data.path={table}", "train.global_batch=2", "model.architecture=two_tower"]
    for columns in ("[]", '["mov"]', '["movie","genres","tags","price"]'):
        overrides = [*towers, f"model.user_columns={columns}"]
        check_advice(partial(accepts, config="tiny"), overrides)
    one = '[columns]\nclicked = { kind = "label" }\nmovie = { kind = "categorical", rows = 9 }\n'
    prepared_small(tmp_path, "clicked,movie\n" + "1,2\n" * 9, one, force=True)
    check_advice(partial(accepts, config="tiny"), towers)

    run = checkpoint(tmp_path / "run", data)
    for overrides in OF_RESUME:
        check_advice(partial(accepts, config="tiny", resume=run), [data[0], *overrides])
    larger = checkpoint(tmp_path / "capped", [*data, "model.max_rows_per_table=60"])
    check_advice(partial(accepts, config="tiny", resume=larger), data)
    check_advice(partial(accepts, config="tiny", resume=run), [*data, "protection.name=mapped"])

    here = version_set.version_set
    with monkeypatch.context() as patched:
        patched.setattr(compatibility.version_set, "version_set", lambda: {**here(), "torch": "9"})
        check_advice(partial(accepts, config="tiny", resume=run), data)

    check_advice(_has_the_versions_of_others, data)

    for overrides in (
        ["model.max_rows_per_table=20"],
        ["model.top_mlp=[8,1]"],
        ["model.embedding_dim=16"],
        ["protection.name=mapped"],
    ):
        check_advice(partial(accepts, config="tiny", init_from=run), [*data, *overrides])

    mapped = [*data, "protection.name=mapped", "cluster.servers=3"]
    made = load_config("tiny", mapped)
    make_folder(tmp_path / "mapped", made.cluster.servers, identity(made), first=True)
    for overrides in (
        ["cluster.servers=2"],
        ["train.seed=9"],
        ["cluster.trainers=4", "train.slots=4"],
    ):
        check_advice(
            partial(accepts, config="tiny", resume=tmp_path / "mapped"), [*mapped, *overrides]
        )

    for words, overrides in (
        ({"hosts": ["a@3"]}, []),
        ({"mtbf": "3"}, ["protection.name=none"]),
    ):
        check_advice(partial(_drills, words), [*data, *overrides])

    for overrides in (
        ["cluster.servers=6", "protection.k=3"],
        ["cluster.servers=5", "protection.name=chain", "protection.copies=3"],
    ):
        check_advice(
            _is_placed_on_two_hosts,
            [*data, "cluster.failure_domain=host", "train.global_batch=60", *overrides],
        )
    for overrides in ([], ["checkpoint.every_steps=5"]):
        check_advice(_writes_to_folders_of_their_own, [*data, *overrides])
    large = [
        f"data.path={dataset(tmp_path / 'large', table_rows=400_000)}",
        "model.max_rows_per_table=0",
    ]
    for overrides in (["storage.prefault=true", "cluster.spares=0"], ["cluster.spares=40"]):
        check_advice(_fits_into_700_mb, [*large, *overrides])
    check_advice(_fits_a_gpu_of_10_mb, [*large, "storage.device=cuda"])
    check_advice(_tables_of_a_script_fit_a_gpu, [*data, "storage.device=cuda"])
    check_advice(_tables_of_a_script_fit, [*data, "storage.prefault=true"])
    check_advice(_rows_and_sums_of_a_table_are_used, [*data, "cluster.placement=tables"])
    # no TensorBoard
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(native, "use", _only_portable)
    monkeypatch.setattr(native, "instruction_set", lambda: "portable")
    monkeypatch.setattr(prefault, "_advise", lambda *words: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for overrides in (
        ["kernels.instruction_set=gfni"],
        ["storage.prefault=true"],
        ["storage.device=cuda"],
        ["train.device=cuda"],
        ["train.tensorboard=true"],
    ):
        check_advice(_fits_the_machine, [*data, *overrides])

    expected = {
        site for path in sorted(Path(ecrm.__file__).parent.rglob("*.py")) for site in sites(path)
    }
    assert len(expected) > 30
    assert expected <= seen, (
        f"no test follows the advice of {sorted(expected - seen)}: add a case here"
    )


def _drills(words: dict[str, object], overrides: Sequence[str]) -> None:
    config = load_config("tiny", overrides)
    options = {"kills": (), "mtbf": None, "count": None, "seed": None, "hosts": (), **words}
    check_survivable(config, parse_disturbance(*options.values()), plan(config))


def _has_the_versions_of_others(overrides: Sequence[str]) -> None:
    mine = needed_versions(load_config("tiny", overrides))
    check_version_sets({0: mine, 1: {**mine, "torch": "9"} if "torch" in mine else mine})


def _is_placed_on_two_hosts(overrides: Sequence[str]) -> None:
    config = load_config("tiny", overrides)
    domains = {"host": lambda rank: f"host {rank % 2}", "rank": lambda rank: f"rank {rank}"}[
        config.cluster.failure_domain
    ]
    start_view(
        config,
        make_protection(config.protection, config.cluster.servers, durable=False),
        {rank: {"failure_domain": domains(rank)} for rank in range(config.world_size)},
    )


def _writes_to_folders_of_their_own(overrides: Sequence[str]) -> None:
    check_shared(load_config("tiny", overrides), Path("run"), [1], [0, 1])


def _fits_into_700_mb(overrides: Sequence[str]) -> None:
    check_memory(load_config("tiny", overrides), 20, 700_000_000)


def _fits_a_gpu_of_10_mb(overrides: Sequence[str]) -> None:
    check_memory(load_config("tiny", overrides), 20, 10**12, (10_000_000,))


def _tables_of_a_script_fit(overrides: Sequence[str]) -> None:
    judged({"a": 2000}, {"a": 1000}, load_config("tiny", overrides).storage.prefault)


def _tables_of_a_script_fit_a_gpu(overrides: Sequence[str]) -> None:
    if load_config("tiny", overrides).storage.device == "cuda":
        judge_gpus({0: 2000}, {0: ("one", 1000)}, {0: "a"})


def _rows_and_sums_of_a_table_are_used(overrides: Sequence[str]) -> None:
    """As for a batch whose bags were summed on their servers, if the placement allows."""
    rows, whole = torch.ones(1, 4), load_config("tiny", overrides).cluster.whole_tables
    place = torch.tensor([0])
    found = FoundRows(1, 4, [Piece(rows, 0, None, place)], torch.empty)
    if whole:
        found = replace(found, summed=[SummedBags(place, rows)])
    fetched = FetchedRows([rows], BatchRows([place], {}, []), found={0: found})
    LookedUp((Entry(0, "f", "t", 1, "sum"),), "sum", 0, place, None, fetched).rows()


def _only_portable(name: str) -> None:
    if name != "portable":
        raise ValueError(f"there is no {name}")


def _fits_the_machine(overrides: Sequence[str]) -> None:
    config = load_config("tiny", overrides)
    use_instruction_set(config.kernels.instruction_set)
    use_device(config)
    if config.train.tensorboard:
        require_tensorboard()
    if config.storage.prefault:
        prefault.Prefault().all_of([torch.zeros(1)])


CONFIG_KEY = re.compile(
    r"\b(set|lower|raise|type|type --set) (?!data\.path|mapped\.path|session\.)[a-z]+\.[a-z_]+"
)


def sites(path: Path) -> Iterator[tuple[str, int]]:
    """(file, line) of every refusal in a file that has a way out, and of every problem of a config.

    Advice must not be in words alone.
    """
    name = str(path.relative_to(Path(ecrm.__file__).parent))
    for node in ast.walk(ast.parse(path.read_text())):
        called = (
            node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        )
        if called not in ("UsageError", "_problem" if name == "config/check.py" else ""):
            continue
        words = "".join(
            part.value
            for part in ast.walk(node)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        )
        assert not CONFIG_KEY.search(words), (
            f"{name}:{node.lineno}: advice to set a key in words: give it as a way out"
        )
        if called == "_problem" or len(node.args) > 1:
            yield name, node.lineno


def test_every_problem_of_a_config_has_a_way_out():
    """Random small configs, most of them refused for several reasons at once."""
    rng, refused = random.Random(1), 0
    for _ in range(400):
        overrides = [
            f"cluster.servers={rng.randint(1, 6)}",
            f"cluster.trainers={rng.randint(1, 5)}",
            f"cluster.spares={rng.randint(0, 2)}",
            f"cluster.layout={rng.choice(('dedicated', 'colocated'))}",
            f"train.slots={rng.randint(0, 6)}",
            f"train.global_batch={rng.randint(1, 40)}",
            f"protection.k={rng.randint(1, 5)}",
            f"protection.m={rng.randint(1, 4)}",
            f"protection.copies={rng.randint(2, 4)}",
            f"protection.scrub_rows_per_step={rng.choice((0, 0, 9))}",
            f"protection.name={rng.choice(list(KEYS['protection.name'].metadata['rule'].choices))}",
            f"checkpoint.every_steps={rng.randint(0, 1)}",
            f"model.embedding_dim={rng.choice((4, 8))}",
        ]
        if refusal(lambda given: load_config("quickstart", given) and None, overrides) is not None:
            refused += 1
            check_advice(lambda given: load_config("quickstart", given) and None, overrides)
    assert refused > 200


def test_the_range_that_a_wrong_value_is_told_is_accepted():
    """The bounds and choices that a message names are values of the key."""
    tried = 0
    for name, field in KEYS.items():
        rule = field.metadata["rule"]
        for value in itertools.chain(rule.choices, (rule.minimum, rule.maximum)):
            if value is None:
                continue
            kind = check.type_of(name)
            value = (
                [int(value)] if kind == tuple[int, ...] else int(value) if kind is int else value
            )
            assert check_value(name, value)[1] is None, (name, value)
            tried += 1
    assert tried > 80


@pytest.mark.parametrize("trainers", [1, 2, 3, 4, 5, 6])
def test_a_run_goes_on_with_any_number_of_trainers_up_to_the_slots(tmp_path, trainers):
    unset = [f"data.path={dataset(tmp_path / 'data')}", "train.slots=0"]
    # which makes four slots, of a batch of 64
    run = checkpoint(tmp_path / "run", [*unset, "cluster.trainers=4"])
    error = refusal(
        partial(accepts, config="tiny", resume=run), [*unset, f"cluster.trainers={trainers}"]
    )
    if trainers <= 4:
        assert (
            error is None
            and load_config("tiny", [*unset, f"cluster.trainers={trainers}"], kept_by(run)).slots
            == 4
        )
        return
    assert (
        str(error) == f"tiny.toml: train.slots is 4, fewer than the {trainers} trainers: set "
        f"cluster.trainers=4"
    )


@pytest.mark.parametrize("train_rows", [1000, 1001, 3003, 7919, 10800])
def test_the_epochs_that_are_advised_make_a_step(tmp_path, train_rows):
    data = f"data.path={dataset(tmp_path / 'data', train_rows)}"
    for batch in (2, 334, 666, 998):
        check_advice(
            partial(accepts, config="tiny"),
            [data, "data.eval_fraction=0", f"train.global_batch={batch}", "train.epochs=0.0001"],
        )

"""Descriptions of a simulated session's model, drawn from a seed; `session_parts` builds it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ecrm.base.wording import counted
from ecrm.testing.simulate.hidden_state import HIDDEN

KINDS = ("mixed", "mixed", "two-tower", "dlrm", "dcn", "projection", "deepfm")
"""Kinds of models. The last four kinds are models of torchrec."""

ROW_OPTIMIZERS = (
    "rowwise adagrad",
    "adagrad",
    "sgd",
    "sgd with decay",
    "adam",
    "adam with decay",
    "adamw",
    "frozen",
)
DENSE_OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "adamw")
SCHEDULERS = ("", "", "cosine", "step", "warm-up")
TORCH_OPTIMIZERS = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Optimizers of torch by the names of their classes; Muon takes matrices alone."""
TORCH_SCHEDULERS = (
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LambdaLR",
    "LinearLR",
    "MultiplicativeLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "SequentialLR",
    "StepLR",
    "SWALR",
)
"""All schedulers of torch that step with each step, by the names of their classes."""
VARIANT_SHARE = 0.5
"""Share of the models with an optimizer of torch, with a scheduler of torch, with skipped batches.

Three separate draws decide.
"""
HIDING_SHARE = 0.2
"""Share of the models with a twin that hides state."""
DATA = ("a function", "Indexed", "Streams")
LOADS = ("", "a file", "a state_dict")
NEW_SHARE = 0.5
"""Share of the models changed by `draw_features`."""
BEGINNINGS = ("usual", "usual", "usual", "bounds", "normal", "whole table")
"""Initial values of rows: default, between two bounds, or by an `init_fn` of rows or a table."""


@dataclass(frozen=True)
class DrawnTable:
    """A table with looked-up `features`; `mean` is whether bags are pooled as MEAN, not SUM."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    optimizer: str
    begins: str
    mean: bool = False


@dataclass(frozen=True)
class SessionModel:
    """A model, the model's data, and the acts of the script.

    - `bags`, `weighted`, `sequences`: tables of an EmbeddingBagCollection, of a collection with
      weighted bags, and of an EmbeddingCollection. `weighted` and `sequences` may be empty.
    - `twice`: whether the first collection is in the model under two names.
    - `batch`: samples of a batch. `most_ids`: most ids of a bag.
    - `average`: whether an average of the weights is registered.
    - `evaluates`: steps between evaluations, 0 for no evaluation. `saves`: whether the script saves
      the model at the end.
    - `data`: a name of `DATA`. `epochs`: with `ecrm.Indexed`, epochs until the end, `None` for
      endless data; with streams, epochs of a stream, `None` for a single epoch.
    - `scales`: whether a GradScaler scales losses. Some losses are then infinite.
    - `checkpoints`: steps between checkpoints, 0 for no checkpoint. `stops`: the step after which
      the run ends, to resume from a checkpoint on all ranks; 0 for no end.
    - `incremental`: whether checkpoints hold changed rows alone. `copies`: whether checkpoints are
      written from a copy.
    - `loads`: a name of `LOADS`, the source of the first weights.
    - `schedules_rows`: whether a scheduler lets the learning rates of rows fall.
    - `evaluates_indexed`: whether evaluations take batches from an `ecrm.Indexed`.
    - `reads`: whether evaluations also read the whole model.
    - `checks`: the number of first steps with every slot computed twice.
    - `skips`: whether the script skips some batches.
    - `hides`: a kind of `HIDDEN` state. A twin of the script hides the state, and must be refused.
      "" for no twin.
    """

    kind: str
    bags: tuple[DrawnTable, ...]
    weighted: tuple[DrawnTable, ...]
    sequences: tuple[DrawnTable, ...]
    twice: bool
    batch: int
    most_ids: int
    norm: bool
    dropout: float
    dense_optimizer: str
    scheduler: str
    clips: bool
    average: bool
    evaluates: int
    saves: bool
    data: str
    epochs: int | None = None
    scales: bool = False
    checkpoints: int = 0
    stops: int = 0
    incremental: bool = False
    copies: bool = False
    loads: str = LOADS[0]
    schedules_rows: bool = False
    evaluates_indexed: bool = False
    reads: bool = False
    checks: int = 0
    skips: bool = False
    hides: str = ""

    @property
    def tables(self) -> tuple[DrawnTable, ...]:
        return self.bags + self.weighted + self.sequences

    @property
    def rows_by_feature(self) -> dict[str, int]:
        """The bound of ids by feature: the rows of the smallest table looked up by the feature."""
        known: dict[str, int] = {}
        for table in self.tables:
            for feature in table.features:
                known[feature] = min(table.rows, known.get(feature, table.rows))
        return known

    @property
    def traits(self) -> list[str]:
        """The traits of the model, as words for counts over schedules."""
        return [
            f"sessions with {what}"
            for what, there in (
                (self.kind, True),
                ("weighted bags", self.weighted),
                ("sequences", self.sequences),
                ("batch norm", self.norm),
                ("dropout", self.dropout),
                ("a scheduler", self.scheduler),
                ("an average", self.average),
                ("evaluations", self.evaluates),
                ("a saved model", self.saves),
                (self.data, self.data != DATA[0]),
                ("epochs that end", self.epochs),
                ("a scaler", self.scales),
                ("checkpoints", self.checkpoints),
                ("a second run that goes on", self.stops),
                ("checkpoints of changes", self.incremental),
                ("checkpoints of copies", self.copies),
                (f"weights of {self.loads}", self.loads),
                ("a scheduler of rows", self.schedules_rows),
                ("evaluations on Indexed", self.evaluates_indexed),
                ("evaluations that read the model", self.reads),
                ("slots that are computed twice", self.checks),
                ("batches left out", self.skips),
                (f"{self.hides} hidden in a refused twin", self.hides),
                (f"torch's {self.dense_optimizer}", self.dense_optimizer in TORCH_OPTIMIZERS),
                (f"torch's {self.scheduler}", self.scheduler in TORCH_SCHEDULERS),
                ("several row optimizers", len({t.optimizer for t in self.tables}) > 1),
            )
            if there
        ]

    def __str__(self) -> str:
        rows = ", ".join(
            f"{table.rows} x {table.dim} {table.optimizer}{' MEAN' if table.mean else ''}"
            for table in self.tables
        )
        said = [f"session with {self.kind}: {counted(len(self.tables), 'table')} ({rows})"]
        said += [trait.removeprefix("sessions with ") for trait in self.traits[1:]]
        said += [f"dense {self.dense_optimizer}", f"batches of {self.batch}"]
        return ", ".join(said)


def draw_model(rng: random.Random) -> SessionModel:
    """Draw a model, with tables that fit the kind of model."""
    kind = rng.choice(KINDS)
    torchrecs = kind in ("dlrm", "dcn", "projection", "deepfm")
    dims = rng.sample((4, 8, 12), 1 if torchrecs else rng.randint(1, 3))
    count = rng.randint(2, 4) if kind in ("two-tower", "projection") else rng.randint(1, 4)
    bags = _tables(rng, "bag", count, dims)
    weighted: tuple[DrawnTable, ...] = ()
    sequences: tuple[DrawnTable, ...] = ()
    if not torchrecs:
        if rng.random() < 0.5:
            weighted = tuple(
                replace(table, mean=False)  # torch's weighted bags are sums
                for table in _tables(rng, "weighted", rng.randint(1, 2), dims)
            )
        if kind == "two-tower" or rng.random() < 0.5:
            sequences = _tables(rng, "sequence", rng.randint(1, 2), dims[:1])
        if rng.random() < 0.5:
            bags = _shared(rng, bags)
    return SessionModel(
        kind=kind,
        bags=bags,
        weighted=weighted,
        sequences=sequences,
        twice=not torchrecs and rng.random() < 0.2,
        batch=rng.choice((2, 3, 6)),
        most_ids=rng.choice((1, 2, 5)),
        norm=not torchrecs and rng.random() < 0.5,
        dropout=0.0 if torchrecs else rng.choice((0.0, 0.3)),
        dense_optimizer=rng.choice(DENSE_OPTIMIZERS),
        scheduler=rng.choice(SCHEDULERS),
        clips=rng.random() < 0.4,
        average=rng.random() < 0.4,
        evaluates=rng.choice((0, 0, 1, 2, 3)),
        saves=rng.random() < 0.2,
        data=DATA[rng.random() < 0.4],
    )


def draw_more(model: SessionModel, steps: int, rng: random.Random) -> SessionModel:
    """Draw data, a scaler and checkpoints for a model of `draw_model`.

    `steps` is the number of steps of the training.
    """
    if rng.random() < 0.3:
        model = replace(model, data="Streams")
    epochs = rng.choice((None, 1, 2, 3))
    scales = rng.random() < 0.3
    checkpoints = rng.choice((0, 0, 0, 1, 2, 4))
    stops = rng.randrange(1, steps) if checkpoints and rng.random() < 0.7 else 0
    return replace(
        model,
        epochs=epochs if model.data == "Indexed" else None,
        scales=scales,
        checkpoints=checkpoints,
        stops=stops,
    )


def draw_features(model: SessionModel, falls: bool, rng: random.Random) -> SessionModel:
    """Draw further acts of the script for a share of the models; `falls`: row rates fall."""
    if rng.random() >= NEW_SHARE:
        return model
    loads = rng.choice((*LOADS, LOADS[0]))
    epochs = rng.choice((None, 1, 2, 3))
    drawn = {
        name: rng.random() < share
        for name, share in {
            "incremental": 0.5,
            "copies": 0.5,
            "schedules_rows": 0.5,
            "evaluates_indexed": 0.5,
            "reads": 0.3,
            "across": 0.4,
        }.items()
    }
    checks = rng.choice((0, 0, 0, 2, 20))
    if drawn["across"] and model.sequences:
        *others, last = model.sequences
        features = (*last.features, rng.choice(model.bags[0].features))
        model = replace(model, sequences=(*others, replace(last, features=features)))
    return replace(
        model,
        loads=loads,
        epochs=epochs if model.data == "Streams" else model.epochs,
        incremental=bool(model.checkpoints) and drawn["incremental"],
        copies=bool(model.checkpoints) and drawn["copies"],
        schedules_rows=falls and drawn["schedules_rows"],
        evaluates_indexed=bool(model.evaluates) and drawn["evaluates_indexed"],
        reads=bool(model.evaluates) and drawn["reads"],
        checks=checks,
    )


def draw_variants(model: SessionModel) -> SessionModel:
    """Draw an optimizer and a scheduler of torch, skipped batches, and hidden state.

    The model itself is the seed: draws of earlier versions stay equal.
    """
    rng = random.Random(str(model))
    optimizer, scheduler = rng.choice(TORCH_OPTIMIZERS), rng.choice(TORCH_SCHEDULERS)
    one, other, third = (rng.random() < VARIANT_SHARE for _ in range(3))
    hides = rng.choice(list(HIDDEN)) if rng.random() < HIDING_SHARE else ""
    return replace(
        model,
        dense_optimizer=optimizer if one else model.dense_optimizer,
        scheduler=scheduler if other else model.scheduler,
        skips=third,
        hides=hides,
    )


def _tables(
    rng: random.Random, name: str, count: int, dims: Sequence[int]
) -> tuple[DrawnTable, ...]:
    """Draw `count` tables of the widths `dims`, some with two features."""
    tables = []
    for number in range(count):
        own = f"{name}{number}"
        tables.append(
            DrawnTable(
                name=own,
                rows=rng.choice((1, 3, 17, 40, 90)),
                dim=rng.choice(dims),
                features=(f"{own}a", f"{own}b") if rng.random() < 0.3 else (f"{own}a",),
                optimizer=rng.choice(ROW_OPTIMIZERS),
                begins=rng.choice(BEGINNINGS),
                mean=rng.random() < 0.4,
            )
        )
    return tuple(tables)


def _shared(rng: random.Random, tables: tuple[DrawnTable, ...]) -> tuple[DrawnTable, ...]:
    """Let the last table also be looked up by a feature of the first table."""
    if len(tables) < 2:
        return tables
    shared = rng.choice(tables[0].features)
    return (*tables[:-1], replace(tables[-1], features=(*tables[-1].features, shared)))

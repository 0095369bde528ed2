"""The module, the optimizers and the batches of a simulated session's drawn model.

The import of torchrec takes seconds. Only a simulated session imports this file.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchrec
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ecrm.testing.simulate.session_model import TORCH_OPTIMIZERS, DrawnTable, SessionModel

META = torch.device("meta")
DENSE = 4
"""Dense numbers of a sample."""
OVERFLOWS = 0.1
"""Share of the batches with an infinite loss, in models with scaled losses."""

_ROW_OPTIMIZERS: Mapping[str, tuple[type, dict[str, float]]] = {
    "rowwise adagrad": (torchrec.optim.RowWiseAdagrad, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd with decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.02}),
    "adam": (torch.optim.Adam, {"lr": 0.02}),
    "adam with decay": (torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
}
_DENSE_OPTIMIZERS: Mapping[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}
_SCHEDULERS: Mapping[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10),
    "step": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, 0.5),
    "warm-up": lambda opt: torch.optim.lr_scheduler.SequentialLR(
        opt,
        [
            torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
        ],
        [3],
    ),
}
_TORCH_RATES = {"Adadelta": 0.5, "Adafactor": 0.05, "SGD": 0.1}
_lrs = torch.optim.lr_scheduler
_TORCH_SCHEDULERS: Mapping[str, Callable[[torch.optim.Optimizer], Any]] = {
    "ChainedScheduler": lambda opt: _lrs.ChainedScheduler(
        [_lrs.ConstantLR(opt, 0.5, 3), _lrs.ExponentialLR(opt, 0.9)]
    ),
    "ConstantLR": lambda opt: _lrs.ConstantLR(opt, 0.5, 4),
    "CosineAnnealingLR": lambda opt: _lrs.CosineAnnealingLR(opt, 7),
    "CosineAnnealingWarmRestarts": lambda opt: _lrs.CosineAnnealingWarmRestarts(opt, 3, 2),
    "CyclicLR": lambda opt: _lrs.CyclicLR(opt, 0.01, 0.1, 2, cycle_momentum=False),
    "ExponentialLR": lambda opt: _lrs.ExponentialLR(opt, 0.9),
    "LambdaLR": lambda opt: _lrs.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "LinearLR": lambda opt: _lrs.LinearLR(opt, 0.1, total_iters=5),
    "MultiplicativeLR": lambda opt: _lrs.MultiplicativeLR(opt, lambda step: 0.95),
    "MultiStepLR": lambda opt: _lrs.MultiStepLR(opt, [1, 3, 3, 6], 0.5),
    "OneCycleLR": lambda opt: _lrs.OneCycleLR(opt, 0.1, total_steps=1000, cycle_momentum=False),
    "PolynomialLR": lambda opt: _lrs.PolynomialLR(opt, 9, 2.0),
    "SequentialLR": lambda opt: _lrs.SequentialLR(
        opt, [_lrs.ConstantLR(opt, 0.5, 2), _lrs.MultiStepLR(opt, [2, 2], 0.5)], [3]
    ),
    "StepLR": lambda opt: _lrs.StepLR(opt, 3, 0.5),
    "SWALR": lambda opt: torch.optim.swa_utils.SWALR(opt, 0.01, 4),
}
_BEGINNINGS: Mapping[str, dict[str, Any]] = {
    "usual": {},
    "bounds": {"weight_init_min": -0.1, "weight_init_max": 0.4},
    "normal": {"init_fn": functools.partial(nn.init.normal_, std=0.3)},
    "whole table": {"init_fn": nn.init.xavier_uniform_},
}


def dense_optimizer(model: SessionModel) -> Callable[[Sequence[nn.Parameter]], Any]:
    """The function that makes the optimizer of the dense part from the parameters."""
    name = model.dense_optimizer
    if name in TORCH_OPTIMIZERS:
        kind, rate = getattr(torch.optim, name), _TORCH_RATES.get(name, 0.01)
        return lambda parameters: kind(parameters, lr=rate)
    return _DENSE_OPTIMIZERS[name]


def scheduler(model: SessionModel) -> Callable[[torch.optim.Optimizer], Any] | None:
    """The function that makes the scheduler of the dense optimizer; `None` for no scheduler."""
    return {**_SCHEDULERS, **_TORCH_SCHEDULERS}.get(model.scheduler)


def row_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """The scheduler of the learning rates of all rows."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def trained_before(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Random weights by the names of the module's state_dict; tables may be on the meta device."""
    random = torch.Generator().manual_seed(seed)
    named = module.state_dict(keep_vars=True)
    values = {
        id(tensor): torch.rand(tensor.shape, generator=random) * 0.3
        if tensor.is_floating_point()
        else tensor.clone()
        for tensor in named.values()
    }
    return {name: values[id(tensor)] for name, tensor in named.items()}


def build(model: SessionModel) -> nn.Module:
    """Build the module. `forward` takes dense numbers and ids; tables have their optimizers."""
    torchrecs = {"dlrm": _dlrm, "dcn": _dcn, "projection": _projection, "deepfm": _deepfm}
    if model.kind in torchrecs:
        return torchrecs[model.kind](_bags(model.bags), model.bags[0].dim)
    return TwoTower(model) if model.kind == "two-tower" else Mixed(model)


def _dlrm(bags: EmbeddingBagCollection, dim: int) -> nn.Module:
    return DLRM(bags, DENSE, [8, dim], [8, 1])  # type: ignore[no-any-return]


def _dcn(bags: EmbeddingBagCollection, dim: int) -> nn.Module:
    return DLRM_DCN(bags, DENSE, [8, dim], [8, 1], 2, 3)  # type: ignore[no-any-return]


def _projection(bags: EmbeddingBagCollection, dim: int) -> nn.Module:
    return DLRM_Projection(  # type: ignore[no-any-return]
        bags, DENSE, [8, dim], [8, 1], [8, 2 * dim], [8, 2 * dim]
    )


def _deepfm(bags: EmbeddingBagCollection, dim: int) -> nn.Module:
    return SimpleDeepFMNN(DENSE, bags, 8, 4)  # type: ignore[no-any-return]


def _bags(tables: Sequence[DrawnTable], weighted: bool = False) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            **_config(table), pooling=PoolingType.MEAN if table.mean else PoolingType.SUM
        )
        for table in tables
    ]
    collection = EmbeddingBagCollection(device=META, tables=configs, is_weighted=weighted)
    _optimize(tables, collection.embedding_bags)
    return collection


def _sequences(tables: Sequence[DrawnTable]) -> EmbeddingCollection:
    configs = [EmbeddingConfig(**_config(table)) for table in tables]
    collection = EmbeddingCollection(device=META, tables=configs)
    _optimize(tables, collection.embeddings)
    return collection


def _config(table: DrawnTable) -> dict[str, Any]:
    return {
        "name": table.name,
        "num_embeddings": table.rows,
        "embedding_dim": table.dim,
        "feature_names": list(table.features),
        **_BEGINNINGS[table.begins],
    }


def _optimize(tables: Sequence[DrawnTable], modules: nn.ModuleDict) -> None:
    for table in tables:
        (weight,) = modules[table.name].parameters()
        if table.optimizer == "frozen":
            weight.requires_grad = False
        else:
            kind, numbers = _ROW_OPTIMIZERS[table.optimizer]
            apply_optimizer_in_backward(kind, [weight], numbers)


class Rows(nn.Module):
    """Collections of tables. The output is float32 [B, width], with sequences summed."""

    def __init__(
        self,
        bags: Sequence[DrawnTable],
        weighted: Sequence[DrawnTable] = (),
        sequences: Sequence[DrawnTable] = (),
        twice: bool = False,
    ) -> None:
        super().__init__()
        self.bags = _bags(bags)
        self.again = self.bags if twice else None
        self.weighted = _bags(weighted, weighted=True) if weighted else None
        self.sequences = _sequences(sequences) if sequences else None
        looked_up = [*bags, *(bags if twice else ()), *weighted, *sequences]
        self.width = sum(table.dim * len(table.features) for table in looked_up)

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        collections = (self.bags, self.again, self.weighted)
        parts = [each(kjt).values() for each in collections if each is not None]
        for jagged in self.sequences(kjt).values() if self.sequences is not None else ():
            samples = torch.arange(kjt.stride()).repeat_interleave(jagged.lengths())
            summed = torch.zeros(kjt.stride(), jagged.values().shape[1])
            parts.append(summed.index_add(0, samples, jagged.values()))
        return torch.cat(parts, 1)


class Mixed(nn.Module):
    """Tables of several kinds under a small network."""

    def __init__(self, model: SessionModel) -> None:
        super().__init__()
        self.rows = Rows(model.bags, model.weighted, model.sequences, model.twice)
        self.norm = nn.BatchNorm1d(self.rows.width) if model.norm else nn.Identity()
        self.over = nn.Sequential(
            nn.Linear(self.rows.width + DENSE, 8),
            nn.GELU(),
            nn.Dropout(model.dropout),
            nn.Linear(8, 1),
        )

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> Tensor:
        return self.over(torch.cat([self.norm(self.rows(kjt)), dense], 1))  # type: ignore[no-any-return]


class TwoTower(nn.Module):
    """Two towers with separate tables, multiplied. The second tower has the sequences."""

    def __init__(self, model: SessionModel) -> None:
        super().__init__()
        half = len(model.bags) // 2
        self.left = Rows(model.bags[:half], model.weighted, twice=model.twice)
        self.right = Rows(model.bags[half:], (), model.sequences)
        self.of_left = nn.Linear(self.left.width + DENSE, 8)
        self.of_right = nn.Linear(self.right.width, 8)
        self.norm = nn.BatchNorm1d(8) if model.norm else nn.Identity()
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> Tensor:
        left = self.norm(self.of_left(torch.cat([self.left(kjt), dense], 1)))
        right = self.dropout(torch.tanh(self.of_right(self.right(kjt))))
        product: Tensor = left * right
        return product.sum(1, keepdim=True)


@dataclass
class Batch:
    """A batch of B samples: dense numbers [B, 4], ids, labels [B], and a factor of the loss."""

    dense: Tensor
    kjt: KeyedJaggedTensor
    label: Tensor
    factor: float = 1.0


def batch_of(model: SessionModel, *key: int, size: int = 0) -> Batch:
    """A batch drawn from `key` alone, with recurring ids; some features have no id.

    The batch has `size` samples, by default the model's batch size.
    """
    drawn = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    random = torch.Generator().manual_seed(int.from_bytes(drawn, "little"))
    rows, size = model.rows_by_feature, size or model.batch
    lengths = [
        torch.randint(0, model.most_ids + 1, (size,), generator=random)
        * int(torch.rand((), generator=random) > 0.1)
        for _ in rows
    ]
    ids = [
        (torch.rand(int(some.sum()), generator=random) ** 3 * below).long()
        for below, some in zip(rows.values(), lengths, strict=True)
    ]
    total = sum(map(len, ids))
    kjt = KeyedJaggedTensor(
        list(rows),
        torch.cat(ids),
        lengths=torch.cat(lengths),
        weights=torch.rand(total, generator=random) if model.weighted else None,
    )
    dense = torch.randn(size, DENSE, generator=random)
    label = torch.randint(0, 2, (size,), generator=random).float()
    overflows = model.scales and float(torch.rand((), generator=random)) < OVERFLOWS
    return Batch(dense, kjt, label, float("inf") if overflows else 1.0)


def left_out(batch: Batch) -> bool:
    """Whether a script that skips batches skips this one: a share of all batches."""
    return int(batch.label.sum()) % 4 == 0


class Stream:
    """A stream of at most `most` batches for a slot, in number and content drawn from a seed."""

    def __init__(self, model: SessionModel, seed: int, slot: int, most: int) -> None:
        self._model, self._random = model, torch.Generator().manual_seed(seed + slot)
        self._left = int(torch.randint(1, most + 1, (), generator=self._random))

    def __iter__(self) -> Iterator[Batch]:
        while self._left:
            self._left -= 1
            yield batch_of(self._model, int(torch.randint(0, 1 << 40, (), generator=self._random)))

    def state_dict(self) -> dict[str, Any]:
        return {"left": self._left, "random": self._random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left = state["left"]
        self._random.set_state(state["random"])


class Average:
    """A moving average of parameters, with a count of the updates."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._means = [parameter.detach().clone() for parameter in parameters]
        self._moves = 0

    def update(self, parameters: Sequence[nn.Parameter]) -> None:
        self._moves += 1
        for mean, parameter in zip(self._means, parameters, strict=True):
            mean.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"means": self._means, "moves": self._moves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._means, self._moves = state["means"], state["moves"]

"""A session in this process alone, and what it trains against TorchRec's classes and torch.optim.

TorchRec's plain tables get gradients of all rows, and torch's optimizers step all of them. A
session's rows that no sample of a step has stay as they are: so do those of the yardstick here.
"""

from __future__ import annotations

import copy
import itertools
import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchrec
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import ecrm
from ecrm.base.errors import DataError, EcrmError, NotFinite, UsageError
from ecrm.engine.table_digest import gather_rows
from ecrm.run.lone_run import PROCESSES
from ecrm.session import save
from ecrm.storage.base import Store
from ecrm.tables.row_source import FetchedRows
from ecrm.transport.alone import LoneTransport
from ecrm.transport.message import Picked
from support.fetching import a_batch

SLOTS, STEPS = 2, 5
DECAY = {"weight_decay": 0.1}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], tuple[str, ...]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.3}, ()),
    "SGD, decay": (torch.optim.SGD, {"lr": 0.3, **DECAY}, ()),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}, ("sum",)),
    "Adagrad, decay": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-6, **DECAY}, ("sum",)),
    "row-wise Adagrad": (RowWiseAdagrad, {"lr": 0.1}, ("sum",)),
    "row-wise Adagrad, decay": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6, **DECAY}, ("sum",)),
    "Adam": (torch.optim.Adam, {"lr": 0.05}, ("exp_avg", "exp_avg_sq")),
    "Adam, decay": (
        torch.optim.Adam,
        {"lr": 0.05, "betas": (0.5, 0.9), **DECAY},
        ("exp_avg", "exp_avg_sq"),
    ),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.3}, ("exp_avg", "exp_avg_sq")),
}
"""By name: class, keywords, and the parts of its state that each row has."""


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    """A lone rank sets torch up as it trains with it."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)
    torch.utils.deterministic.fill_uninitialized_memory = filled


class Model(nn.Module):
    """Bags, weighted bags and rows over features that tables share, below one linear layer."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}
        bags = [
            EmbeddingBagConfig(pooling=draw.choice([PoolingType.SUM, PoolingType.MEAN]), **table)
            for table in self._tables(draw, "abc", [4, 8])
        ]
        weighted = [EmbeddingBagConfig(**table) for table in self._tables(draw, "de", [8, 12])]
        rows = [EmbeddingConfig(**table) for table in self._tables(draw, "gh", [8])]
        self.bags = nn.ModuleList(
            [
                torchrec.EmbeddingBagCollection(bags),
                torchrec.EmbeddingBagCollection(weighted, is_weighted=True),
            ]
        )
        self.rows = torchrec.EmbeddingCollection(rows)
        wide = sum(len(t.feature_names) * t.embedding_dim for t in (*bags, *weighted))
        self.over = nn.Linear(wide, 3)

    def _tables(self, draw: random.Random, names: str, dims: list[int]) -> Iterator[dict[str, Any]]:
        for name in names[: draw.randrange(1, len(names) + 1)]:
            features, rows = draw.sample("tuvwx", draw.randrange(1, 4)), draw.randrange(3, 25)
            for feature in features:
                self.sizes[feature] = min(self.sizes.get(feature, 99), rows)
            yield {
                "name": name,
                "num_embeddings": rows,
                "embedding_dim": draw.choice(dims),
                "feature_names": features,
            }

    def forward(self, kjt: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled = torch.cat([bags(kjt).values() for bags in self.bags], 1)
        found = torch.cat([jagged.values() for jagged in self.rows(kjt).values()])
        return self.over(pooled), found.sin().sum(0)

    def loss(self, kjt: KeyedJaggedTensor) -> Tensor:
        scores, summed = self(kjt)
        return scores.square().mean() + summed.square().mean()

    @property
    def table_weights(self) -> dict[str, nn.Parameter]:
        names = dict(self.named_parameters())
        return {name: names[name] for name in names if not name.startswith("over")}


class Yardstick:
    """TorchRec's model, whose rows torch's optimizers update where a step's samples have them."""

    def __init__(self, model: Model, chosen: dict[str, str], rate: Callable[[int], float]) -> None:
        self.model, self._rate, self._steps = model, rate, 0
        self._dense = torch.optim.Adam(model.over.parameters(), lr=0.01)
        self.rows = {
            name: (weight, *_made(chosen[name], weight))
            for name, weight in model.table_weights.items()
        }
        self._rates = {name: made.param_groups[0]["lr"] for name, (_, made, _) in self.rows.items()}

    def step(self, batches: list[KeyedJaggedTensor]) -> list[float]:
        self.model.zero_grad()
        losses = [self.model.loss(kjt) for kjt in batches]
        (sum(losses) / len(losses)).backward()
        self._dense.step()
        used = self._used(batches)
        for name, (weight, optimizer, parts) in self.rows.items():
            others = ~used[name]
            optimizer.param_groups[0]["lr"] = self._rates[name] * self._rate(self._steps)
            before = weight.detach().clone(), *(p.clone() for p in self._state(name))
            optimizer.step()
            for now, then in zip((weight.detach(), *self._state(name)), before, strict=False):
                now[others] = then[others]
            if len(before) == 1:  # the first step has made the state
                for part in self._state(name):
                    part[others] = 0
        self._steps += 1
        return [loss.item() for loss in losses]

    def _state(self, name: str) -> list[Tensor]:
        weight, optimizer, parts = self.rows[name]
        return [optimizer.state[weight][part] for part in parts if part in optimizer.state[weight]]

    def state(self, name: str) -> Tensor:
        """Optimizer state of a table, float32 [rows, floats]."""
        parts = self._state(name)
        return torch.cat(parts, 1) if parts else torch.empty(len(self.rows[name][0]), 0)

    def _used(self, batches: list[KeyedJaggedTensor]) -> dict[str, Tensor]:
        used = {name: torch.zeros(len(w), dtype=torch.bool) for name, (w, *_) in self.rows.items()}
        model = self.model
        kinds = [
            (f"bags.{number}.embedding_bags", bags.embedding_bag_configs())
            for number, bags in enumerate(model.bags)
        ]
        kinds.append(("rows.embeddings", model.rows.embedding_configs()))
        for path, configs in kinds:
            for config in configs:
                for kjt in batches:
                    for feature in config.feature_names:
                        used[f"{path}.{config.name}.weight"][kjt[feature].values()] = True
        return used


def _made(name: str, weight: nn.Parameter) -> tuple[torch.optim.Optimizer, tuple[str, ...]]:
    kind, numbers, parts = OPTIMIZERS[name]
    return kind([weight], **numbers), parts


def state_of(session: ecrm.Session, part: Callable[[Store, Tensor], Tensor]) -> dict[str, Tensor]:
    """Rows of all tables, or their optimizer state, by the names of weights."""
    engine, found = session._engine, {}
    for space, row_space in enumerate(engine.state.spaces):
        for table, first in zip(row_space.tables, row_space.offsets, strict=True):
            rows = torch.arange(first, first + table.rows)
            values = gather_rows(engine, space, rows, part, 0)
            assert values is not None
            found[f"{table.name}.weight"] = values
    return found


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_random_models_are_trained_as_torchrec_and_torch_do(name, seed):
    draw = random.Random(f"{name} {seed}")
    torch.manual_seed(draw.randrange(1 << 30))
    model = Model(draw)
    chosen = {weight: name if draw.random() < 0.6 else draw.choice([*OPTIMIZERS])
              for weight in model.table_weights}  # fmt: skip
    chosen[next(iter(chosen))] = name
    batches = {
        (step, slot): a_batch(draw, model.sizes, draw.randrange(1, 6), weighted=True)
        for step in range(STEPS)
        for slot in range(SLOTS)
    }
    begun = copy.deepcopy(model)
    rate = draw.choice([lambda step: 1.0, lambda step: 1 / (1 + step)])
    _, *others = model.table_weights
    frozen = {weight for weight in others if draw.random() < 0.15}
    for weight, parameter in model.table_weights.items():
        parameter.requires_grad_(weight not in frozen)
    yardstick = Yardstick(copy.deepcopy(model), chosen, rate)
    for weight, parameter in model.table_weights.items():
        kind, numbers, _ = OPTIMIZERS[chosen[weight]]
        if weight not in frozen:
            apply_optimizer_in_backward(kind, [parameter], numbers)
    session = ecrm.Session(
        model,
        slots=SLOTS,
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        sparse_rate=rate,
    )
    logged: dict[int, list[float]] = {}
    session.on_commit(
        lambda step, by_slot: logged.update({step: [n["loss"] for n in by_slot.values()]})
    )
    for kjt in session.steps(lambda step, slot: batches[step, slot], STEPS):
        loss = session.model.loss(kjt)
        loss.backward()
        session.log(loss=loss)
    for step in range(STEPS):
        losses = yardstick.step([batches[step, slot] for slot in range(SLOTS)])
        assert logged[step + 1] == pytest.approx(losses, rel=1e-4, abs=1e-5)
    rows, states = state_of(session, Store.lookup), state_of(session, Store.lookup_state)
    assert rows.keys() == yardstick.rows.keys()
    for weight, (theirs, *_) in yardstick.rows.items():
        close(rows[weight], theirs)
        unchanged = torch.equal(rows[weight], begun.table_weights[weight])
        assert unchanged == (weight in frozen)
        if not unchanged:
            close(states[weight], yardstick.state(weight))
    close(session.model.over.weight.detach(), yardstick.model.over.weight)


def small() -> nn.ModuleDict:
    """One table of 9 rows in bags, below one linear layer."""
    torch.manual_seed(0)
    table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["a"])
    bags = torchrec.EmbeddingBagCollection([table], device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    return nn.ModuleDict({"bags": bags, "over": nn.Linear(4, 1)})


def score(model: nn.ModuleDict, kjt: KeyedJaggedTensor) -> Tensor:
    return model["over"](model["bags"](kjt).values())


def ids(step: int, slot: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], torch.tensor([step % 9, slot]), lengths=torch.tensor([1, 1]))


def begun(
    model: nn.Module, scaler: torch.amp.GradScaler | None = None, **options: Any
) -> ecrm.Session:
    return ecrm.Session(
        model,
        slots=2,
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        grad_scaler=scaler,
        **options,
    )


def test_a_module_with_a_state_beside_its_tensors_is_refused():
    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            pass

    model = small()
    model["over"] = nn.Sequential(Counting(4, 1))
    with pytest.raises(UsageError, match="^over.0 is a Counting with get_extra_state, .*: keep"):
        begun(model)


def test_a_notebook_trains_evaluates_and_saves(tmp_path, capsys):
    session, evaluated = begun(small()), []

    @session.every(25)
    def evaluate() -> None:
        for kjt in session.eval_batches([ids(0, slot) for slot in range(3)]):
            session.gather(scores=score(session.model, kjt))
        evaluated.append(session.gathered["scores"].shape)

    for kjt in session.steps(ids, 50):
        loss = score(session.model, kjt).square().mean()
        loss.backward()
        session.log(loss=loss)
    session.save(tmp_path / "model.pt")
    said = capsys.readouterr()
    assert "ecrm: warning: this process trains alone, and nothing is protected; " in said.err
    assert said.err.count("\n") == 1
    checked, progress = said.out.splitlines()
    assert checked.startswith("each slot of the first step is computed twice and compared; ")
    assert progress.startswith("step 50/50 ") and " loss 0." in progress
    assert evaluated == [(6, 1), (6, 1)]
    plain = small().to_empty(device="cpu")
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert torch.equal(plain["over"].weight, session.model["over"].weight)
    (rows,) = state_of(session, Store.lookup).values()
    assert torch.equal(plain["bags"].embedding_bags["t"].weight, rows)


def test_a_process_may_train_one_session_after_another_and_to_the_same():
    rows = []
    for _ in range(2):
        session = begun(small())
        for kjt in session.steps(ids, 3):
            score(session.model, kjt).square().mean().backward()
        rows += state_of(session, Store.lookup).values()
    assert torch.equal(*rows)
    for _ in range(2):
        with pytest.raises(UsageError, match="was called before: one session trains once"):
            next(session.steps(ids, 3))


def test_models_drawn_one_after_the_other_begin_with_other_weights():
    weights, draws = [], []
    for number in range(4):
        torch.manual_seed(0) if number == 0 else None
        draws.append(random.random() if number else 0.0)
        table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["a"])
        bags = torchrec.EmbeddingBagCollection([table], device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
        session = begun(nn.ModuleDict({"bags": bags, "over": nn.Linear(4, 1)}))
        weights.append(session.model["over"].weight.detach().clone())
        if number == 2:
            for kjt in session.eval_batches([ids(0, 0)]):
                session.gather(out=score(session.model, kjt))
        else:
            for kjt in session.steps(ids, 3):
                score(session.model, kjt).square().mean().backward()
    assert len(set(draws)) == 4
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(weights, 2))


def test_a_loop_that_is_left_is_told(capsys):
    session = begun(small())
    for kjt in session.steps(ids, 9):
        score(session.model, kjt).square().mean().backward()
        if session.step == 2:
            break
    told = capsys.readouterr().err
    assert "training was left in step 2 of 9: to end it early, call session.stop() in" in told


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda: ecrm.Session(small(), slots=2, seed=-1), "at least 0 is needed"),
        (lambda: ecrm.Session(small(), slots=2, seed=2**64), r"a seed is below 2\*\*64"),
        (lambda: next(begun(small()).steps(ids, 3.0)), "steps=3.0.: give a whole number"),
        (lambda: begun(small()).report(None), r"session.report.None.: give one number"),
    ],
)
def test_a_number_that_cannot_be_is_told(use, said):
    with pytest.raises(UsageError, match=said):
        use()


def test_a_comparison_without_a_first_value_is_refused():
    session = begun(small())

    @session.every(1, mode="min", patience=2)
    def look():
        session.report(loss=0.5)

    with pytest.raises(UsageError, match=r"type session.report.loss, loss=loss."):
        for kjt in session.steps(ids, 3):
            score(session.model, kjt).square().mean().backward()


def test_a_file_without_tables_is_checked_as_it_is_loaded(tmp_path):
    path = tmp_path / "dense.pt"
    weight = torch.rand(1, 4)
    torch.save({"over.weight": weight, "over.bias": torch.rand(1)}, path)
    begun(small()).load(path, strict=False)
    data = bytearray(path.read_bytes())
    data[data.index(weight.numpy().tobytes()) + 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="is damaged: the checksum of"):
        begun(small()).load(path, strict=False)


def test_a_session_without_optimizers_evaluates_a_saved_model(tmp_path):
    trained = begun(small())
    for kjt in trained.steps(ids, 3):
        score(trained.model, kjt).square().mean().backward()
    trained.save(tmp_path / "model.pt")
    plain = small().to_empty(device="cpu")
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
    model = small()
    for table in model["bags"].embedding_bags.values():
        del table.weight._optimizer_classes
    session = ecrm.Session(model, slots=1)
    session.load(tmp_path / "model.pt")
    for kjt in session.eval_batches([ids(7, 0), ids(8, 0)]):
        session.gather(score=score(session.model, kjt))
    wanted = torch.cat([score(plain, ids(step, 0)) for step in (7, 8)])
    assert torch.equal(session.gathered["score"], wanted.detach())
    with pytest.raises(UsageError, match="this session evaluates alone"):
        next(session.steps(ids, 3))


def test_a_model_that_is_not_finite_is_not_saved(tmp_path):
    def overflow(parameters: Any) -> None:
        with torch.no_grad():
            parameters[0].view(-1)[1] = float("inf")

    session = ecrm.Session(
        small(),
        slots=2,
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        before_step=overflow,
    )
    for kjt in session.steps(ids, 1):
        score(session.model, kjt).square().mean().backward()
    (tmp_path / "model.pt").write_bytes(b"before")
    with pytest.raises(
        EcrmError, match=r"model.pt is not written: over.weight is not finite"
    ) as no:
        session.save(tmp_path / "model.pt")
    assert no.value.exit_code == NotFinite.exit_code
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    assert (tmp_path / "model.pt").read_bytes() == b"before"


def test_an_error_in_the_body_is_the_users_own():
    session = begun(small())
    with pytest.raises(ZeroDivisionError):
        for _ in session.steps(ids, 3):
            1 / 0  # noqa: B018


def test_a_loss_that_is_not_finite_ends_the_run():
    session = begun(small())
    with pytest.raises(NotFinite, match=r"the loss of step 0 .*; lower the learning rates"):
        for kjt in session.steps(ids, 3):
            (score(session.model, kjt) * torch.inf).sum().backward()


def train_scaled(
    scaler: torch.amp.GradScaler, factor: Callable[[int], float], steps: int
) -> ecrm.Session:
    """The session of a loss that is as large as `factor(step)` has it."""
    session = begun(small(), scaler)
    for kjt in session.steps(ids, steps):
        loss = score(session.model, kjt).square().mean() * factor(session.step)
        scaler.scale(loss).backward()
    return session


def test_gradients_that_are_never_finite_end_a_run_whose_steps_are_skipped(capsys):
    with pytest.raises(NotFinite, match=r"50 steps in a row were skipped, up to step 49, .*; low"):
        train_scaled(torch.amp.GradScaler("cpu"), lambda step: torch.nan, 200)
    # one step that counts between them is enough
    train_scaled(torch.amp.GradScaler("cpu"), lambda s: 1.0 if s == 40 else torch.nan, 70)
    assert "skipped 69  committed 70" in capsys.readouterr().out


@pytest.mark.parametrize("scale", [0.0, torch.inf, torch.nan])
def test_a_scale_with_which_nothing_is_finite_ends_the_run(scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with pytest.raises(NotFinite, match=f"slot 0 computes step 0 with a loss scale of {scale}: "):
        train_scaled(scaler, lambda step: 1.0, 5)


def test_a_loss_that_is_not_scaled_is_told():
    scaler = torch.amp.GradScaler("cpu")
    session = begun(small(), scaler)
    with pytest.raises(
        UsageError, match=r"step 1, slot 0: .*: call grad_scaler.scale\(loss\).back"
    ):
        for kjt in session.steps(ids, 3):
            loss = score(session.model, kjt).square().mean()
            (loss if session.step else scaler.scale(loss)).backward()
    assert session.step == 1
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    for kjt in (session := begun(small(), disabled)).steps(ids, 1):
        score(session.model, kjt).square().mean().backward()
    assert session.step == 1


def test_slots_are_computed_twice_where_the_script_asks_for_it(capsys):
    def train(check: int, noisy: bool) -> None:
        session = ecrm.Session(
            small(),
            slots=1,
            dense_optimizer=lambda ps: torch.optim.SGD(ps),
            check_determinism=check,
        )
        for kjt in session.steps(ids, 3):
            factor = next(noise) if noisy else 1.0
            (score(session.model, kjt).square().mean() * factor).backward()

    noise = iter(range(1, 99))
    train(2, noisy=False)
    assert (
        "each slot of steps 0 to 1 was computed twice, to the same bits" in capsys.readouterr().out
    )
    train(0, noisy=True)
    with pytest.raises(UsageError, match="step 0, slot 0 was computed twice, and the gradient of "):
        train(1, noisy=True)
    with pytest.raises(UsageError, match=r"check_determinism=-1\): at least 0 is needed"):
        train(-1, noisy=False)


def test_an_option_of_ecrm_launch_that_plain_python_was_given_is_told(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py", "--check-determinism", "3"])
    session = begun(small())
    next(session.steps(ids, 1))
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "determinism" in line]
    assert told.startswith("ecrm: warning: --check-determinism is an option of ecrm launch")


def test_gradients_that_are_finite_until_they_are_divided_are_skipped():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-140)
    session = begun(small(), scaler)
    for kjt in session.steps(ids, 3):
        scaler.scale(torch.zeros(()))
        score(session.model, kjt).square().mean().backward()
    assert scaler.get_scale() == 2.0**-143
    assert all(rows.isfinite().all() for rows in state_of(session, Store.lookup).values())


@pytest.mark.parametrize("launcher", PROCESSES)
def test_one_of_several_processes_does_not_train_alone(monkeypatch, launcher):
    monkeypatch.setenv(PROCESSES[launcher], "3")
    with pytest.raises(UsageError) as error:
        next(begun(small()).steps(ids, 3))
    assert f"was started 3 times by {launcher} and without ecrm: type ecrm launch " in str(
        error.value
    )
    monkeypatch.setenv(PROCESSES[launcher], "1")
    next(begun(small()).steps(ids, 3))


def test_a_lone_transport_gives_copies_to_itself():
    transport, sent = LoneTransport(), torch.arange(6.0).view(3, 2)
    parts = [sent, Picked(sent, torch.tensor([2, 0])), (7, -1)]
    for received in (transport.exchange({0: parts}), transport.share(parts)):
        tensor, picked, head = received[0]
        assert tensor.tolist() == [0, 1, 2, 3, 4, 5] and picked.tolist() == [4, 5, 0, 1]
        assert head == (7, -1)
        tensor.zero_(), picked.zero_()
    assert sent.sum() == 15 and transport.sent_bytes == 0
    assert transport.exchange({}) == transport.exchange({0: []}) == transport.share([]) == {}
    assert transport.agree(True) is True and transport.agree(False) is False
    transport.shrink()
    assert transport.live == (0,)
    with pytest.raises(ValueError, match=r"ranks \[1\], which are not live"):
        transport.exchange({1: parts})
    with pytest.raises(ValueError, match="not contiguous"):
        transport.share([sent.t()])


@pytest.mark.parametrize("kind", [RowWiseAdagrad, torch.optim.Adam])
def test_without_a_session_a_model_trains_as_with_torchrecs_classes(kind):
    """The optimizer of the rows steps in backward, and steps all rows."""
    table = {"num_embeddings": 9, "embedding_dim": 8}
    weights = []
    for module in (torchrec, ecrm):
        torch.manual_seed(1)
        bags = module.EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name="t", feature_names=["a", "b"], **table),
                EmbeddingBagConfig(name="u", feature_names=["c"], **table),
            ]
        )
        rows = module.EmbeddingCollection([EmbeddingConfig(name="v", feature_names=["c"], **table)])
        model = nn.ModuleDict({"dlrm": DLRM(bags, 3, [8], [4, 1]), "rows": rows})
        for collection in (bags, rows):
            apply_optimizer_in_backward(kind, collection.parameters(), {"lr": 0.1})
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        optimizer = torch.optim.SGD(dense.values(), lr=0.1)
        for seed in range(3):
            kjt = a_batch(random.Random(seed), {"a": 9, "b": 9, "c": 9}, 4)
            loss = model["dlrm"](torch.rand(4, 3), kjt).square().mean()
            loss = loss + model["rows"](kjt)["c"].values().square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        weights.append(model.state_dict())
        assert all(weight.grad is None for weight in (*bags.parameters(), *rows.parameters()))
    torch.manual_seed(1)
    assert weights[0].keys() == weights[1].keys() and len(weights[0]) == 3 + 2 + 4
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    first = torchrec.EmbeddingBagCollection([EmbeddingBagConfig(name="t", **table)])
    assert not torch.equal(
        weights[1]["dlrm.sparse_arch.embedding_bag_collection.embedding_bags.t.weight"],
        first.embedding_bags["t"].weight,
    )


class Largest(TorchDispatchMode):
    """The most bytes of one tensor that torch makes, but for views."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not (func.is_view or result.is_meta):
            self.bytes = max(self.bytes, result.nbytes)
        return result


@pytest.mark.parametrize("rows_at_once", [1000, 50_000])
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_table_is_saved_without_being_held(name, rows_at_once, tmp_path, monkeypatch):
    """The twin saves it in one window, and must be seen to hold it."""
    rows, dim = 50_000, 8
    table = EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["a"]
    )
    bags = torchrec.EmbeddingBagCollection([table], device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    model = nn.ModuleDict({"bags": bags, "over": nn.Linear(dim, 1)})
    session = begun(model)
    for kjt in session.steps(ids, 2):
        score(session.model, kjt).square().mean().backward()
    monkeypatch.setattr(save, "CHUNK_ROWS", rows_at_once)
    tracemalloc.start()
    with Largest() as largest:
        session.save(tmp_path / name)
    _, by_python = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held = max(largest.bytes, by_python) / (4 * rows * dim)
    assert (tmp_path / name).stat().st_size >= 4 * rows * dim
    assert held < 0.5 if rows_at_once < rows else held >= 1


def test_numbers_may_come_from_numpy_and_torch():
    session = ecrm.Session(
        small(),
        slots=np.int64(2),
        seed=torch.tensor(3),
        check_determinism=np.int32(0),
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    session.every(np.int64(2))(lambda: None)
    for kjt in session.steps(ids, np.int64(3)):
        score(session.model, kjt).square().mean().backward()
    assert session.step == 3
    with pytest.raises(UsageError, match=r"Session\(slots=2.0\): give a whole number"):
        ecrm.Session(small(), slots=2.0)


def test_an_optimizer_or_a_schedule_that_is_made_already_is_named():
    made = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(made, 2)
    told = (
        r"is a torch.optim.sgd.SGD, and not a function that makes one: type dense_optimizer=lambda"
    )
    with pytest.raises(UsageError, match=told):
        ecrm.Session(small(), slots=1, dense_optimizer=made)
    with pytest.raises(UsageError, match="type scheduler=lambda optimizer: StepLR.optimizer, ..."):
        ecrm.Session(
            small(),
            slots=1,
            dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            scheduler=schedule,
        )


def test_a_table_that_has_grown_keeps_its_old_rows(tmp_path, capsys):
    def with_rows(rows: int, extra: bool = False) -> nn.Module:
        configs = [
            EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=4, feature_names=["f"])
        ]
        if extra:
            more = EmbeddingBagConfig(
                name="u", num_embeddings=7, embedding_dim=4, feature_names=["g"]
            )
            configs.append(more)
        bags = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
        apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
        return bags

    def trained(module: nn.Module, path: Any = None, **how: Any) -> dict[str, Tensor]:
        session = ecrm.Session(module, slots=1, seed=5)
        if path is not None:
            session.load(path, **how)
        for kjt in session.steps(a_kjt, 1):
            session.model(kjt).values().square().mean().backward()
        return session.state_dict()

    def a_kjt(step: int, slot: int) -> KeyedJaggedTensor:
        ids, lengths = torch.tensor([1, 2]), torch.tensor([1, 1])
        return KeyedJaggedTensor(["f", "g"], ids, lengths=lengths)

    name = "embedding_bags.t.weight"
    old = trained(with_rows(9))
    torch.save(old, tmp_path / "m.pt")
    with pytest.raises(
        UsageError, match="9 x 4 float32 there, 12 x 4 .*: for new rows type strict"
    ):
        trained(with_rows(12), tmp_path / "m.pt")
    capsys.readouterr()
    begun = trained(with_rows(12))[name]
    grown = trained(with_rows(12), tmp_path / "m.pt", strict=False)[name]
    assert "session.load: table embedding_bags.t has 3 new rows" in capsys.readouterr().out
    kept = [row for row in range(9) if row != 1]  # which is trained once more
    assert torch.equal(grown[kept], old[name][kept])
    assert torch.equal(grown[9:], begun[9:])
    added = trained(with_rows(9, extra=True), tmp_path / "m.pt", strict=False)
    assert "embedding_bags.u.weight not in the file, new here" in capsys.readouterr().out
    assert torch.equal(added[name][kept], old[name][kept])
    with pytest.raises(UsageError, match="9 x 4 float32 there, 5 x 4 float32 here"):
        trained(with_rows(5), tmp_path / "m.pt", strict=False)


def one_backward(session: ecrm.Session, kjt: KeyedJaggedTensor, before: list[Tensor]) -> None:
    score(session.model, kjt).square().mean().backward()


def two_losses(session: ecrm.Session, kjt: KeyedJaggedTensor, before: list[Tensor]) -> None:
    score(session.model, kjt).square().mean().backward()
    score(session.model, kjt).mean().backward()


def two_looks(session: ecrm.Session, kjt: KeyedJaggedTensor, before: list[Tensor]) -> None:
    (score(session.model, kjt) * score(session.model, kjt)).mean().backward()


def one_graph_twice(session: ecrm.Session, kjt: KeyedJaggedTensor, before: list[Tensor]) -> None:
    loss = score(session.model, kjt).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def a_penalty_first(session: ecrm.Session, kjt: KeyedJaggedTensor, before: list[Tensor]) -> None:
    loss = score(session.model, kjt).square().mean()
    torch.autograd.grad(loss, session.model["over"].weight, retain_graph=True)
    loss.backward()


def the_slot_before(session: ecrm.Session, kjt: KeyedJaggedTensor, before: list[Tensor]) -> None:
    """A graph of the slot before, whose memory is on its way to servers, is gone back through."""
    loss = score(session.model, kjt).square().mean()
    loss.backward(retain_graph=True)
    if before:
        (before.pop() * 9).backward()
    else:
        before.append(loss)


BACKWARDS = [
    one_backward,
    two_losses,
    two_looks,
    one_graph_twice,
    a_penalty_first,
    the_slot_before,
]


@pytest.mark.parametrize("backwards", BACKWARDS)
def test_gradients_in_the_memory_for_sending_are_those_in_other_memory(backwards, monkeypatch):
    def trained() -> tuple[dict[str, Tensor], int, int]:
        session, before, taken, left = begun(small(), check_determinism=0), [], 0, 0
        for kjt in session.steps(ids, 3):
            backwards(session, kjt, before)
            fetched = session.model["bags"]._source.current
            (leaf,) = fetched.leaves
            place = session._engine.gradient_buffer(session._engine.slots[0], 0, len(leaf))
            other = session._engine.gradient_buffer(session._engine.slots[1], 0, len(leaf))
            left += 0 in fetched.unsummed
            assert (leaf.grad is None) == (0 in fetched.unsummed)
            if leaf.grad is not None:
                taken += leaf.grad.data_ptr() in (place.data_ptr(), other.data_ptr())
        return state_of(session, Store.lookup), taken, left

    direct, taken, left = trained()
    settled = backwards in (two_losses, one_graph_twice)
    assert (taken, left) == (6 * settled, 6 * (not settled and backwards is not two_looks))
    monkeypatch.setattr(FetchedRows, "leave", lambda rows, space, gradients: False)
    summed, taken, left = trained()
    assert (taken, left) == (0 if backwards is two_looks else 6, 0)
    monkeypatch.setattr(FetchedRows, "take_memory", lambda rows, space: None)
    copied, taken, left = trained()
    assert not taken and not left
    for other in (summed, copied):
        assert all(torch.equal(direct[name], other[name]) for name in direct)

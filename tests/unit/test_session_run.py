"""What a session's run is known by, and what it tells of its progress."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ecrm.base.errors import UsageError
from ecrm.base.wording import MOST_SHOWN
from ecrm.checkpoint.compatibility import check_identity, check_steps, same_bits
from ecrm.checkpoint.exported_model import exported_model
from ecrm.config import load_config
from ecrm.config.script import Script
from ecrm.engine.hooks import Hooks
from ecrm.engine.step_log import StepLog
from ecrm.model.module_replica import ModuleReplica
from ecrm.model.nested_state import packed
from ecrm.placement.initial_values import Values
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table
from ecrm.run.auto_resume import check_same
from ecrm.run.consistency import given_of
from ecrm.run.gather import gather_results
from ecrm.run.hello import (
    Hello,
    Inputs,
    check_inputs,
    check_models,
    check_weights,
    hello_of,
    needed_versions,
)
from ecrm.run.inputs import OF_SCRIPT
from ecrm.run.reported import Goal, Reported
from ecrm.run.session_progress import SessionProgress
from ecrm.run.session_run import SessionSummaryFields, merged_config
from ecrm.run.spec import RunSpec
from ecrm.run.started import Wanted
from ecrm.run.trained_module import TrainedModule, digests_of, names_of, shapes_of
from ecrm.run.user_code import UserCode
from ecrm.testing.simulated_transport import ProgramFailed, SimulatedCluster

ADAGRAD = SparseOptimizer("adagrad", 0.1)
PATH = Path("run/checkpoints/step-5")
SCRIPT = Script(Path("train.py"))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def trained(
    width: int = 4,
    steps: int = 10,
    slots: int = 2,
    rows: int = 9,
    optimizer=ADAGRAD,
    wire_dtype=torch.float32,
):
    module = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width))
    tables = [Table("user", rows, 8, optimizer)]
    wanted = Wanted(tables, lambda: None, slots, 3, steps, None, wire_dtype=wire_dtype)
    return TrainedModule(wanted, shapes_of(module), names_of(module), {})


def test_a_run_may_go_on_with_other_rates_and_more_steps_and_says_so():
    before, now = trained(), trained(steps=20, optimizer=replace(ADAGRAD, learning_rate=0.2))
    said = before.identity()
    now.check_identity(PATH, said)
    assert now.changes(said, now.identity()) == [
        "user: learning_rate 0.1 -> 0.2",
        "steps 10 -> 20",
    ]
    assert same_bits(said, trained(steps=20).identity())
    assert not same_bits(said, now.identity())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"rows": 10}, "table user is 10 x 8 with adagrad there, 9 x 8 with adagrad here: "),
        ({"optimizer": SparseOptimizer("sgd", 0.1)}, "table user is 9 x 8 with sgd there, "),
        ({"width": 5}, "tensor 0.weight is 5 x 8 there, 4 x 8 here; tensor 0.bias is 5 there, "),
        (
            {"wire_dtype": torch.bfloat16},
            "was made with Session(wire_dtype=torch.bfloat16), here it is torch.float32: "
            "take torch.bfloat16, or start without",
        ),
        ({"slots": 4}, "was made with Session(slots=4), here it is 2: take 4, or start without "),
    ],
)
def test_another_model_is_refused_tensor_by_tensor(other, said):
    with pytest.raises(UsageError) as refused:
        trained().check_identity(PATH, trained(**other).identity())
    assert said in str(refused.value)
    assert str(refused.value).startswith(str(PATH))


def test_a_run_of_a_version_without_wire_dtype_has_float32():
    assert "wire_dtype" not in trained().identity()
    rounded = trained(wire_dtype=torch.bfloat16)
    rounded.check_identity(PATH, rounded.identity())
    rounded.check_init(PATH, trained().identity())
    with pytest.raises(UsageError, match=r"wire_dtype=torch.float32\), here it is torch.b"):
        rounded.check_identity(PATH, trained().identity())
    assert not same_bits(trained().identity(), rounded.identity())


def test_ranks_with_another_dtype_on_the_wire_are_named():
    rounded, exact = trained(wire_dtype=torch.bfloat16), trained()
    check_models({0: exact.about(), 1: exact.about()})
    with pytest.raises(UsageError, match="wire_dtype is bfloat16 on rank 1, float32 on rank 0: bu"):
        check_models({0: exact.about(), 1: rounded.about()})


def test_weights_to_begin_with_may_be_of_another_optimizer_but_not_of_another_shape():
    trained().check_init(PATH, trained(optimizer=SparseOptimizer("sgd", 0.1), slots=5).identity())
    with pytest.raises(UsageError, match="tensor 0.weight is 6 x 8 there"):
        trained().check_init(PATH, trained(width=6).identity())


def test_no_more_tensors_are_named_than_one_can_read():
    module = TrainedModule(
        trained().wanted, {f"layer{i}": [i] for i in range(MOST_SHOWN + 3)}, {}, {}
    )
    with pytest.raises(UsageError, match=f"layer{MOST_SHOWN - 1} is .*; and 10 more: start"):
        trained().check_identity(PATH, module.identity())


def test_a_script_and_the_built_in_trainer_do_not_go_on_with_one_another(criteo_rows):
    config = load_config("tiny", [f"data.path={criteo_rows}"])
    with pytest.raises(UsageError, match="is of the model of a script: start that script"):
        check_identity(PATH, trained().identity(), config)
    with pytest.raises(UsageError, match="is of a config, and not"):
        trained().check_identity(PATH, {"data": {}})


def test_steps_beyond_those_of_a_script_are_set_in_the_script():
    """Its config may not have train.steps."""
    check_steps(PATH, 8, 8, of_script=True)
    with pytest.raises(UsageError, match="at step 12, this script trains 8: have session.steps t"):
        check_steps(PATH, 12, 8, of_script=True)


def test_what_a_script_decides_must_fit_the_ranks():
    config = load_config("tiny", ["data.path=x", "train.seed=0"])  # 2 trainers, 6 ranks
    assert merged_config(RunSpec(SCRIPT, config), trained().wanted, 6).train.steps == 10
    with pytest.raises(UsageError, match=r"Session\(slots=1\) is fewer than the 2 trainers: type"):
        merged_config(RunSpec(SCRIPT, config), trained(slots=1).wanted, 6)
    with pytest.raises(UsageError, match="train.seed is 8, but the script has Session"):
        other = replace(config, train=replace(config.train, seed=8))
        merged_config(RunSpec(SCRIPT, other), trained().wanted, 6)
    with pytest.raises(UsageError, match="needs 6 ranks .* but 5 were started"):
        merged_config(RunSpec(SCRIPT, config), trained().wanted, 5)


def test_the_best_model_needs_a_place_for_its_checkpoint():
    wanted = replace(trained().wanted, keeps_best=True)

    def settle(*sets: str, run_dir: Path | None = PATH) -> None:
        merged_config(
            RunSpec(SCRIPT, load_config("tiny", ["data.path=x", "train.seed=0", *sets]), run_dir),
            wanted,
            6,
        )

    settle()
    settle("checkpoint.at_end=false", "checkpoint.every_steps=5")
    with pytest.raises(UsageError, match="the run has no folder: type --run-dir DIR"):
        settle(run_dir=None)
    with pytest.raises(UsageError, match="writes none: leave out checkpoint.at_end=false"):
        settle("checkpoint.at_end=false")
    with pytest.raises(UsageError, match=r"protection.name is mapped, .*leave out keep_best"):
        settle("protection.name=mapped")


def test_a_resume_with_a_file_of_other_rows_is_told_so(tmp_path):
    def about(begins: str) -> dict:
        return {"table": {"user": {"rows": 9, "begins": begins}}, "seed": 3}

    event = {"time": 1.0, "event": "start", "run": about("values 1")}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    check_same(tmp_path, about("values 1"))
    with pytest.raises(UsageError, match="whose table user began with other rows: put the file"):
        check_same(tmp_path, about("values 2"))
    larger = {"table": {"user": {"rows": 10, "begins": "values 2"}}, "seed": 3}
    with pytest.raises(UsageError, match="holds a run with table .*: name a new folder"):
        check_same(tmp_path, larger)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_run_folder_of_another_dtype_on_the_wire_is_refused(tmp_path, dtypes):
    before, now = (trained(wire_dtype=getattr(torch, name)).about() for name in dtypes)
    event = {"time": 1.0, "event": "start", "run": before}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    check_same(tmp_path, before)
    said = f"a run with wire_dtype {dtypes[0]}, here wire_dtype is {dtypes[1]}: name a new folder"
    with pytest.raises(UsageError, match=said):
        check_same(tmp_path, now)


def note(**logged: float) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(logged).encode()), dtype=torch.uint8)


def test_progress_has_the_means_of_what_was_logged_since_the_last():
    told, replica = [], ModuleReplica(nn.Module(), None)
    engine = SimpleNamespace(
        step=0,
        committed=0,
        state=SimpleNamespace(
            commits=0,
            failures_left=1,
            rebuild_fraction=1.0,
            log=StepLog(),
            dense=replica,
        ),
    )
    progress = SessionProgress(6, 2, lambda step, make: told.append(make()) is None)
    for step in range(6):
        if step != 3:  # of which this rank does not know
            engine.state.log.add(step, {0: note(loss=step, norm=1.0), 1: note(loss=step + 1.0)})
        if step >= 4:
            replica.skip()
        engine.step = engine.committed = engine.state.commits = step + 1
        progress.step_finished(engine)
    assert [(each.step, each.logged, each.window) for each, _ in told] == [
        (2, {"loss": 1.0, "norm": 1.0}, 2),
        (4, {"loss": 2.5, "norm": 1.0}, 1),
        (6, {"loss": 5.0, "norm": 1.0}, 2),
    ]
    assert "loss 2.5000  norm 1.0000  (of 1 of 2 steps)  committed 4" in told[1][1]
    assert "loss 5.0000  norm 1.0000  skipped 2  committed 6" in told[2][1]
    assert [each.skipped for each, _ in told] == [0, 0, 2]
    open_end = SessionProgress(
        6000, 2, lambda step, make: told.append(make()) is None, open_end=True
    )
    engine.step = 0
    for engine.step in (1, 2):
        open_end.step_finished(engine)
    assert told[-1][1].startswith("step    2 of at most 6000  ")


def test_the_end_of_a_run_says_how_many_steps_were_skipped_also_before_a_resume():
    before, replica = ModuleReplica(nn.Module(), None), ModuleReplica(nn.Module(), None)
    before.skip()
    before.commit()
    before.skip()
    before.undo()
    replica.load(before.export())
    replica.skip()
    state = SimpleNamespace(dense=replica, hooks=Hooks(inquest=UserCode()))
    words = SessionSummaryFields(SimpleNamespace(step=7, state=state), 10)
    assert words.of_stopped() == {"steps_skipped": 2, "slot_faults": []}
    assert words.of_summary(14, 7.0)["steps_skipped"] == 2


def test_weights_that_differ_from_rank_to_rank_are_refused():
    torch.manual_seed(0)
    one, other = (digests_of(nn.Linear(3, 2).state_dict()) for _ in range(2))
    check_weights({0: one, 2: one, 5: one})
    with pytest.raises(UsageError, match="weight begins with other numbers on rank 5 than on ra"):
        check_weights({0: one, 2: one, 5: {**one, "weight": other["weight"]}})


def filled(seed: int) -> Table:
    random = torch.Generator().manual_seed(seed)
    return Table("item", 9, 8, ADAGRAD, Values(torch.rand(9, 8, generator=random)))


OTHERS = {
    "table user is 10 x 8 with adagrad on rank 2, 9 x 8 with adagrad on rank 0: build": (
        lambda: trained(rows=10)
    ),
    "tensor 0.weight is 5 x 8 on rank 2, 4 x 8 on rank 0; tensor 0.bias": lambda: trained(5),
    "rates.user.learning_rate is 0.2 on rank 2, 0.1 on rank 0: build it alike": (
        lambda: trained(optimizer=replace(ADAGRAD, learning_rate=0.2))
    ),
    "table item begins with other numbers on rank 2 than on rank 0: draw them alike": (
        lambda: with_tables(trained(), filled(2))
    ),
    "table item is missing on rank 2, 9 x 8 with adagrad, begun as values": trained,
}


def with_tables(model: TrainedModule, *tables: Table) -> TrainedModule:
    wanted = replace(model.wanted, tables=[*model.wanted.tables, *tables])
    return replace(model, wanted=wanted)


@pytest.mark.parametrize("told", OTHERS)
def test_ranks_that_have_built_other_models_are_told_what_differs_first(told):
    """Through the hellos of all ranks, of which one has another model."""
    config = load_config("tiny", ["data.path=x"])
    with_items = "table item" in told

    def program(transport):
        usual = with_tables(trained(), filled(1)) if with_items else trained()
        model = OTHERS[told]() if transport.rank == 2 else usual
        about = json.loads(json.dumps(model.about()))
        mine = Inputs(
            given_of("here", config, 10, script="x"), "the CPU", needed_versions(config), about, {}
        )
        said = gather_results(transport, lambda: hello_of(transport, config, mine, False, -1))
        hellos = {rank: Hello(**facts) for rank, facts in said.items()}
        check_inputs(transport, hellos, mine, OF_SCRIPT)

    with pytest.raises(ProgramFailed) as failed:
        SimulatedCluster(4, 0, []).run(program)
    for error in failed.value.errors.values():
        assert told in str(error) and "copy the script" not in str(error)
        assert error.speaker == 0 and "\n" not in str(error)


def test_a_tensor_has_all_its_names_in_the_state_dict_and_none_that_is_not_kept():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    module[1].weight = module[0].weight
    module.register_buffer("mask", torch.ones(2), persistent=False)
    names = names_of(module)
    assert names.keys() == module.state_dict().keys()
    assert names["1.weight"] == names["0.weight"] == "0.weight" and names["1.bias"] == "1.bias"


def test_a_table_of_several_names_has_all_of_them_in_the_exported_model():
    weight = nn.Parameter(torch.empty(9, 8, device="meta"))
    module = nn.ModuleDict({"user": nn.Embedding(9, 8), "friend": nn.Embedding(9, 8)})
    module["user"].weight = module["friend"].weight = weight
    module["top"] = nn.Linear(8, 1)
    said = TrainedModule(trained().wanted, shapes_of(module), names_of(module), {}).identity()
    assert said["names"] == {"friend.weight": "user.weight", **trained_names("top")}
    model = exported_model(said)
    assert model.names == {"user": ("user.weight", "friend.weight")}
    state = {name: torch.ones(shape) for name, shape in said["tensor"].items()}
    assert model.dense_of([packed(state)]).keys() == {"top.weight", "top.bias"}


def trained_names(layer: str) -> dict[str, str]:
    return {f"{layer}.{name}": f"{layer}.{name}" for name in ("weight", "bias")}


def test_values_of_other_data_or_of_another_mode_begin_a_new_comparison():
    most, least = Goal("max", False, 2), Goal("min", False, 2)
    before = Reported().after(0.7, 10, 0, most).after(0.6, 20, 0, most)
    assert (before.best, before.step, before.without_gain) == (0.7, 10, 1)
    assert before.after(0.5, 20, 0, most) == before, "the same step again"
    again = Reported.from_state(json.loads(json.dumps(before.state())))
    assert again.after(0.6, 30, 0, most).out_of_patience
    for anew in (again.after(0.5, 20, 0, most, data_began=20), again.after(0.5, 20, 0, least)):
        assert (anew.best, anew.step, anew.without_gain) == (0.5, 20, 0)


def test_a_value_off_the_schedule_may_be_the_best_and_does_not_count_for_the_patience():
    most = Goal("max", True, 2)
    before = Reported().after(0.7, 10, 0, most).after(0.6, 20, 0, most)
    worse = before.after(0.5, 25, 0, most, on_schedule=False)
    better = before.after(0.8, 25, 0, most, on_schedule=False)
    assert (worse.best, worse.step, worse.without_gain) == (0.7, 10, 1)
    assert (better.best, better.step, better.without_gain) == (0.8, 25, 1)
    for reported in (before, worse, better):
        again = Reported.from_state(json.loads(json.dumps(reported.state())))
        assert again.after(0.65, 30, 0, most).out_of_patience
        assert not again.after(0.75, 30, 0, most).after(0.74, 40, 0, most).out_of_patience
    first = Reported().after(0.9, 5, 0, most, on_schedule=False).after(0.5, 10, 0, most)
    assert (first.best, first.step, first.without_gain) == (0.9, 5, 0)


def test_the_best_value_of_an_older_checkpoint_is_to_be_beaten():
    old = {"at": {"0": 10}, "best": 0.7, "step": 10, "without_gain": 1, "of": "max 0", "named": {}}
    assert Reported.from_state(old).after(0.6, 20, 0, Goal("max", True, 2)).out_of_patience


def test_an_end_of_training_at_the_step_gone_on_from_is_forgotten():
    ended, replica = ModuleReplica(nn.Linear(1, 1), sgd), ModuleReplica(nn.Linear(1, 1), sgd)
    ended.end_at(8)
    ended.commit()
    replica.load(ended.export())
    assert replica.ends_at == 8
    replica.goes_on_from = 8
    replica.load(ended.export())
    assert replica.ends_at == -1

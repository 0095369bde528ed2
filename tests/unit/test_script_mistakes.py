"""What a script does with its session, on one rank: it works, or one line says what to change."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from ecrm.base.errors import EcrmError
from ecrm.config.script import Script
from ecrm.model.determinism import prepared_torch
from ecrm.process.calls import CallCount
from ecrm.run import gather
from ecrm.run import session_run as build
from ecrm.run import this_rank as session_rank
from ecrm.run.run_script import _run
from ecrm.run.spec import RunSpec
from ecrm.run.this_rank import ThisRank
from ecrm.transport.alone import LoneTransport

ONE_RANK = [
    "cluster.layout=colocated",
    "cluster.servers=1",
    "cluster.trainers=1",
    "cluster.spares=0",
    "protection.name=none",
]
HEAD = """
import torch
import torchrec
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm

def ids(step, slot):
    ones = torch.ones(2, dtype=torch.int64)
    return torchrec.KeyedJaggedTensor(["f"], torch.tensor([step, slot]), lengths=ones)

def made():
    table = torchrec.EmbeddingBagConfig(
        name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"]
    )
    bags = torchrec.EmbeddingBagCollection([table], device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    return ecrm.Session(bags, slots=2)

def loss(session, batch):
    return session.model(batch).values().square().mean()

session = made()
"""
LOOP = """
for batch in session.steps(ids, 3):
    loss(session, batch).backward()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a script that begins with HEAD, as `ecrm launch` does on one rank."""

    def run(text: str) -> int:
        path = tmp_path / "train.py"
        path.write_text(HEAD + text)
        script = Script(path)
        spec = RunSpec(script, script.load_config(ONE_RANK))
        stop = SimpleNamespace(received=None)
        return _run(ThisRank(LoneTransport(), spec, stop, CallCount()))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session_rank, "_this", [])
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [*sys.path])
    with prepared_torch(threads=1):
        yield run
    gc.unfreeze()


WORKS = {
    "a second session that is not trained": "other = made()" + LOOP,
    "a print": LOOP + "print('done', session.step)",
    "a batch left out": LOOP.replace("loss(", "session.skip(); loss("),
    "a stop in the last step": LOOP + "assert session.step == 3",
    "a model that is copied and not called": LOOP + "import copy; copy.deepcopy(session.model)",
}


@pytest.mark.parametrize("what", WORKS)
def test_what_a_script_may_do_does_not_disturb_its_training(run, what, capsys):
    assert run(WORKS[what]) == 0
    assert "finished 3 steps" in capsys.readouterr().out


def test_a_script_may_evaluate_a_model_and_train_nothing(run, capsys):
    evaluates = """
for batch in session.eval_batches([ids(0, 0), ids(1, 0)]):
    session.gather(out=session.model(batch).values())
assert len(session.gathered["out"])
session.save("model.pt")
"""
    assert run(evaluates) == 0
    said = capsys.readouterr().out
    assert "finished 0 steps" in said and "computed twice" not in said


def test_sessions_train_one_after_the_other(run, capsys):
    again = "session = made()" + LOOP
    evaluates = "session = made()\nfor batch in session.eval_batches([ids(0, 0)]): pass\n"
    assert run(LOOP + "drawn = torch.rand(3)\n" + evaluates + again) == 0
    said = capsys.readouterr().out
    assert said.count("finished 3 steps") == 2 and said.count("finished 0 steps") == 1
    first, _, second = [line for line in said.splitlines() if line.startswith("model_sha256")]
    assert first == second


def test_a_session_that_is_over_is_freed_before_the_next_is_built(run, monkeypatch):
    engines, end, free = [], build._end_before, build.free_memory

    def ending(rank) -> None:
        engines.append(weakref.ref(rank.part.engine))
        end(rank)

    def freed() -> None:
        free()
        assert engines[-1]() is None

    monkeypatch.setattr(build, "_end_before", ending)
    monkeypatch.setattr(build, "free_memory", freed)
    assert run(LOOP + "session = made()" + LOOP) == 0
    assert len(engines) == 1


def test_an_early_end_is_told(run, capsys):
    assert run(LOOP.replace("loss(", "session.stop(); loss(")) == 0
    said = capsys.readouterr().out
    assert "training ends at step 1 of 3: session.stop() was called" in said
    assert "finished 1 step " in said


LEFT = """
def main():
    for batch in session.steps(ids, 3):
        loss(session, batch).backward()
        if session.step == 1:
            {}
"""
MISTAKES = {
    "break": (
        LEFT.format("break") + "main()",
        "has left a loop in step 1, slot 0: let loops over session.steps and ",
    ),
    "return": (LEFT.format("return") + "main()", "has left a loop in step 1, slot 0: let loops"),
    "a loop that goes on elsewhere": (
        "batches = session.steps(ids, 3)\nloss(session, next(batches)).backward()",
        "has left a loop in step 0, slot 0: let loops",
    ),
    "break, and then save": (
        LEFT.format("break") + "main()\nsession.save('model.pt')",
        "session.save is called while step 1 is under way: call it after the loop",
    ),
    "steps twice": (LOOP + LOOP, "session.steps was called before: one session trains once"),
    "training after an evaluation alone": (
        "for batch in session.eval_batches([ids(0, 0)]): session.model(batch)\n" + LOOP,
        "session.eval_batches came before session.steps: this session evaluates alone: evaluate in",
    ),
    "no steps": (
        "for batch in session.steps(ids, 0): pass",
        "session.steps(batches, 0): at least 1 is needed: to evaluate a model alone, loop over",
    ),
    "a skip behind the loop": (LOOP + "session.skip()", "session.skip belongs into the body"),
    "a session before another one": (
        LOOP + "first, session = session, made()" + LOOP + "first.save('model.pt')",
        "session.save: another session has begun since, which ended this one: call it before the",
    ),
    "a session after one that could not begin": (
        """
session.every(1, mode="max", keep_best=True)(lambda: None)
try:
    for batch in session.steps(ids, 3):
        pass
except ecrm.base.errors.EcrmError as error:
    assert "the run has no folder" in str(error)
session = made()
"""
        + LOOP,
        "a session before could not begin, and no other can in this run: mend that, and start",
    ),
    "a loop that was left before another session": (
        LEFT.format("break") + "main()\nsession = made()" + LOOP,
        "has left a loop in step 1, slot 0: let loops over session.steps and ",
    ),
    "no session": ("", "has ended without training: no session.steps() ran"),
    "no loop": ("session.steps(ids, 3)", "has ended without training: no session.steps() ran"),
    "a model before the loop": (
        "session.model(ids(0, 0))",
        "no step fetched any: call the model inside session.steps or session.eval_batches",
    ),
    "a model after the loop": (
        LOOP + "session.model(ids(0, 0))",
        "no step fetched any: call the model inside session.steps or session.eval_batches",
    ),
    "a process group": (
        "torch.distributed.init_process_group('gloo')",
        "leave out process groups, for a session has ranks of its own",
    ),
    "a DistributedDataParallel": (
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))",
        "leave out process groups, for a session has ranks of its own",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_in_a_script_is_told_in_one_line(run, what):
    text, said = MISTAKES[what]
    with pytest.raises(EcrmError) as told:
        run(text)
    assert said in str(told.value) and "\n" not in str(told.value)
    assert told.value.speaker == 0, "all ranks end with it"


def test_a_process_group_of_several_is_refused(run, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(EcrmError, match="has a process group, which does not survive a killed r"):
        run(LOOP)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(session_rank, "_this", [])
    assert run(LOOP) == 0


def test_a_start_is_three_messages_between_ranks(run, monkeypatch):
    """Hello, the decision of the lowest rank, and the join of all ranks."""
    messages: list[object] = []
    shared = gather.share_at_start

    def share(transport, mine):
        messages.append(mine)
        return shared(transport, mine)

    monkeypatch.setattr(gather, "share_at_start", share)
    assert run(LOOP) == 0
    assert len(messages) == 3

"""Configs: defaults, files, overrides, and every message that a wrong one earns."""

import tomllib

import pytest

from ecrm.base.errors import UsageError
from ecrm.config import (
    Config,
    effective,
    load_config,
    make_config,
    reference,
    shipped_configs,
)
from ecrm.config.check import KEYS

DATA = "data.path=somewhere"


def message(*overrides: str, config: str = "quickstart") -> str:
    with pytest.raises(UsageError) as caught:
        load_config(config, overrides)
    return str(caught.value)


def test_defaults_fill_what_a_file_leaves_out(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[data]\npath = "rows"\n')
    config = load_config(file)
    assert config.data.path == "rows"
    assert config == make_config({"data": {"path": "rows"}}, "")
    assert config.to_dict() == Config(data=config.data).to_dict()


def test_overrides_are_toml_and_bare_words_are_text():
    config = load_config(
        "quickstart",
        [
            "data.path=a/b c",
            "model.bottom_mlp=[8, 4]",
            "model.embedding_dim=4",
            "train.sparse_optimizer=sgd",
            "protection.verify_parity_at_end=false",
            "train.sparse_lr=1",
            "train.seed=3",
            "train.seed=4",
        ],
    )
    assert config.data.path == "a/b c"
    assert config.model.bottom_mlp == (8, 4)
    assert config.train.sparse_optimizer == "sgd"
    assert config.protection.verify_parity_at_end is False
    assert config.train.sparse_lr == 1.0 and isinstance(config.train.sparse_lr, float)
    assert config.train.seed == 4


def test_a_path_that_looks_like_a_number_is_text():
    assert load_config("quickstart", ["data.path=2024"]).data.path == "2024"
    assert load_config("quickstart", ['data.path="2024"']).data.path == "2024"


def test_an_override_cannot_smuggle_in_a_second_key():
    assert "train.seed" in message("train.seed=1\nsteps = 5")


@pytest.mark.parametrize("name", list(shipped_configs()))
def test_every_shipped_config_is_right_and_survives_being_printed(name):
    config = load_config(name, [DATA])
    assert make_config(tomllib.loads(effective(config)), name) == config
    assert config.world_size >= config.failures_survived + 1


def test_shipped_configs_are_found_by_bare_name_and_with_suffix():
    assert set(shipped_configs()) >= {"quickstart", "tiny", "criteo-kaggle", "criteo-terabyte"}
    assert load_config("tiny.toml", [DATA]) == load_config("tiny", [DATA])


def test_the_reference_names_every_key_and_holds_the_defaults():
    text = reference()
    assert all(f"{name.partition('.')[2]} = " in text for name in KEYS)
    words = " ".join(text.replace("\n# ", " ").split())
    assert all(field.metadata["rule"].description in words for field in KEYS.values())
    assert max(map(len, text.splitlines())) <= 100
    raw = tomllib.loads(text)
    raw["data"]["path"] = "x"
    assert make_config(raw, "") == make_config({"data": {"path": "x"}}, "")


@pytest.mark.parametrize(
    ("layout", "servers", "trainers", "spares", "world"),
    [("dedicated", 4, 2, 1, 7), ("colocated", 4, 2, 1, 5), ("colocated", 4, 6, 0, 6)],
)
def test_world_size_follows_the_layout(layout, servers, trainers, spares, world):
    config = load_config(
        "quickstart",
        [
            f"cluster.layout={layout}",
            f"cluster.servers={servers}",
            f"cluster.trainers={trainers}",
            f"cluster.spares={spares}",
            "train.global_batch=48",
        ],
    )
    assert config.world_size == world
    assert config.slots == trainers


def test_steps_on_the_command_line_replace_the_file_s_epochs_and_the_reverse():
    steps = load_config("quickstart", ["train.steps=5"]).train
    assert (steps.steps, steps.epochs) == (5, 0.0)
    epochs = load_config("tiny", [DATA, "train.epochs=2"]).train
    assert (epochs.steps, epochs.epochs) == (0, 2.0)


@pytest.mark.parametrize("name", ["checkpoint", "stateless", "mapped", "erasure"])
def test_one_word_picks_a_protection_that_needs_checkpoints(name):
    chosen = load_config("tiny", [DATA, f"protection.name={name}"])
    assert chosen.checkpoint.every_minutes == (30 if name in ("checkpoint", "stateless") else 0)
    given = load_config("tiny", [DATA, f"protection.name={name}", "checkpoint.every_steps=7"])
    assert (given.checkpoint.every_minutes, given.checkpoint.every_steps) == (0, 7)


def test_failures_survived_is_m_under_erasure_and_nothing_without():
    assert load_config("criteo-kaggle").failures_survived == 2
    assert load_config("criteo-kaggle", ["protection.name=none"]).failures_survived == 0


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "storage.backend=native",
            "storage.backend: no key any more, leave the key out: rows have one store",
        ),
        ("train.lr=1", "train.lr: no such key; did you mean train.sparse_lr?"),
        (
            "train.embedding_dim=8",
            "train.embedding_dim: no such key; did you mean model.embedding_dim?",
        ),
        ("cluster.server=8", "cluster.server: no such key; did you mean cluster.servers?"),
        ("embedding_dim=8", "embedding_dim: no such key; did you mean model.embedding_dim?"),
        ("clutser.spares=8", "clutser.spares: no such key; did you mean cluster.spares?"),
        ("modle.qqq=8", "modle.qqq: no section [modle]; did you mean [model]?"),
        ("qqq.zzz=8", "qqq.zzz: no section [qqq]; the sections are data, model, train,"),
        ("data.zzz=8", "data.zzz: no such key; [data] has path, eval_fraction"),
        ("train=8", "train is a section, not a key; it has global_batch, slots,"),
        ("train.seed", "--set train.seed: must look like section.key=value"),
        ("train.seed=true", "train.seed is true: must be a whole number, from 0 to "),
        ("train.seed=1.5", "train.seed is 1.5: must be a whole number"),
        ("train.seed=-1", "train.seed is -1: must be from 0 to "),
        ("train.sparse_lr=fast", 'train.sparse_lr is "fast": must be a number, above 0'),
        ("train.sparse_lr=0", "train.sparse_lr is 0.0: must be above 0"),
        ("train.dense_lr=inf", "train.dense_lr is inf: must be a number"),
        ("train.threads=0", "train.threads is 0: must be from 1 to 1024"),
        ("data.eval_fraction=0.6", "data.eval_fraction is 0.6: must be from 0 to 0.5"),
        (
            "model.embedding_dim=18",
            "model.embedding_dim is 18: must be from 4 to 1024 and a multiple of 4",
        ),
        (
            "model.bottom_mlp=64",
            "model.bottom_mlp is 64: must be a list of whole numbers, such as [64, 32, 16]",
        ),
        ("model.bottom_mlp=[]", "model.bottom_mlp is []: must be a list of whole numbers"),
        ("model.bottom_mlp=[0,16]", "model.bottom_mlp is [0, 16]: each must be from 1 to 65536"),
        ("testing.skip_undo=yes", 'testing.skip_undo is "yes": must be true or false'),
        (
            "protection.name=erasur",
            'protection.name is "erasur": must be one of none, erasure, chain, replicate, '
            "stateless, checkpoint, mapped; did you mean erasure?",
        ),
        (
            "protection.scrub_rows_per_step=-1",
            "protection.scrub_rows_per_step is -1: must be at least 0",
        ),
        (
            "model.max_rows_per_table=4294967296",
            "model.max_rows_per_table is 4294967296: must be from 0 to 2147483647",
        ),
        ("cluster.hang_seconds=1e-300", "cluster.hang_seconds is 1e-300: must be at least 0.1"),
        ("cluster.start_seconds=0.5", "cluster.start_seconds is 0.5: must be at least 1"),
        ("train.sparse_lr=1e39", "train.sparse_lr is 1e+39: must be above 0 and at most 3e+38"),
        ("train.dense_lr=1e39", "train.dense_lr is 1e+39: must be above 0 and at most 3e+38"),
        ("train.sparse_eps=1e-50", "train.sparse_eps is 1e-50: must be from 1e-37 to 3e+38"),
        ("train.epochs=1e300", "train.epochs is 1e+300: must be from 0 to 1000000"),
        (
            "train.steps=9223372036854775808",
            "train.steps is 9223372036854775808: must be below 2^63",
        ),
        ("cluster.servers=60000", "cluster.servers is 60000: must be from 1 to 4096"),
        (
            "cluster.servers=4095",
            "4,095 servers + 2 trainers + 1 spare make 4098 ranks, more than 4096: set "
            "cluster.servers=4093",
        ),
        ('data.path="a\\u0000b"', 'data.path is "a\\u0000b": must not hold the character NUL'),
        ("train.seed=" + "1" * 5000, 'train.seed is "1111'),
        ("train.seed=0x" + "f" * 5000, "train.seed is a number of 20000 bits: must be from 0 to "),
        (
            "train.sparse_lr=0x" + "f" * 5000,
            "train.sparse_lr is a number of 20000 bits: must be a number",
        ),
        ("train.seed=" + "[" * 5000, 'train.seed is "[[[['),
        ("protection.commit_interval=0", "protection.commit_interval is 0: must be at least 1"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_would_be_right(override, said):
    text = message(override)
    assert said in text
    assert "\n" not in text and len(text) < 500


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["model.embedding_dim=32"],
            "model.bottom_mlp ends in 16, but model.embedding_dim is 32: "
            "set model.bottom_mlp=[64,32,32] or model.embedding_dim=16",
        ),
        (
            ["model.top_mlp=[64]"],
            "model.top_mlp ends in 64, must end in 1, the logit: set model.top_mlp=[64,1]",
        ),
        (
            ["train.global_batch=1023"],
            "train.global_batch is 1023, not a multiple of the 2 slots: set "
            "train.global_batch=1022",
        ),
        (["train.global_batch=1"], "set train.global_batch=2"),
        (
            ["train.slots=1"],
            "train.slots is 1, fewer than the 2 trainers: set train.slots=2 or cluster.trainers=1",
        ),
        (
            ["train.steps=5", "train.epochs=1"],
            "train.steps is 5 and train.epochs is 1.0, of which one may be given: set "
            "train.epochs=0 or train.steps=0",
        ),
        (["train.epochs=0"], "train.steps and train.epochs are both 0: set train.epochs=1"),
        (
            ["protection.k=4"],
            "protection.k + protection.m = 5 needs at least 5 servers, cluster.servers is 4: "
            "set cluster.servers=5 or protection.k=3",
        ),
        (
            ["protection.m=4"],
            "needs at least 7 servers, cluster.servers is 4: set cluster.servers=7",
        ),
        (
            ["protection.name=none", "protection.scrub_rows_per_step=100"],
            "protection.scrub_rows_per_step is 100, but protection.name is none, which keeps no "
            "parity to compare with: "
            "set protection.name=erasure or protection.scrub_rows_per_step=0",
        ),
        (
            ["protection.name=checkpoint", "checkpoint.every_minutes=0"],
            "protection.name is checkpoint, which restores what is lost from checkpoints, but "
            "checkpoint.every_steps and "
            "checkpoint.every_minutes are both 0: set checkpoint.every_steps=100 or "
            "checkpoint.every_minutes=10",
        ),
        (
            ["protection.name=stateless", "checkpoint.every_steps=0"],
            "protection.name is stateless, which restores what is lost from checkpoints, but "
            "checkpoint.every_steps and "
            "checkpoint.every_minutes are both 0: set checkpoint.every_steps=100 or "
            "checkpoint.every_minutes=10",
        ),
        (
            [
                "protection.name=stateless",
                "checkpoint.every_steps=9",
                "cluster.layout=colocated",
                "cluster.servers=1",
                "cluster.trainers=1",
                "cluster.spares=0",
            ],
            "protection.name is stateless, which keeps two dense replicas, but there is one "
            "rank: set cluster.spares=1",
        ),
        (
            ["testing.flip=1@row"],
            'testing.flip is "1@row": must be RANK@STEP:row, RANK@STEP:state or RANK@STEP:parity',
        ),
        (
            ["testing.flip=4@3:row"],
            'testing.flip is "4@3:row": rank 4 is no server, servers are ranks 0 to 3',
        ),
        (["testing.flip=1@30:row", "train.steps=30"], "there is no step 30, the last is 29"),
        (
            ["testing.flip=1@3:parity", "protection.name=none"],
            "but protection.name is none: there is no parity",
        ),
        (
            ["testing.flip=1@3:state", "train.sparse_optimizer=sgd"],
            "but train.sparse_optimizer is sgd: it keeps no state",
        ),
        (
            ["protection.k=250", "protection.m=6", "cluster.servers=300"],
            "protection.k + protection.m = 256: at most 255 units fit a stripe over GF(2^8): set "
            "protection.k=249",
        ),
    ],
)
def test_keys_that_do_not_fit_together_are_named_with_a_way_out(overrides, said):
    text = message(*overrides)
    assert text.startswith("quickstart.toml: ") and said in text
    assert "\n" not in text


def test_without_protection_k_and_m_need_no_servers():
    assert load_config("quickstart", ["protection.name=none", "cluster.servers=1"]).world_size == 4


def test_all_problems_are_told_at_once():
    lines = message("train.lr=1", "train.seed=-1", "model.embedding_dim=3").splitlines()
    assert lines[0] == "quickstart.toml: 3 problems"
    assert len(lines) == 4


def test_the_data_path_has_no_default():
    assert "data.path is missing" in message(config="tiny")


def test_a_file_s_problems_name_the_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('seed = 3\n[data]\npath = "x"\n[modle]\n[train.sgd]\nlr = 1\n')
    lines = message(config=str(file)).splitlines()
    assert lines[0] == f"{file}: 3 problems"
    assert "seed: no such key; did you mean train.seed?" in lines[1]
    assert "[modle]" in lines[2] and "train.sgd: no such key" in lines[3]


def test_a_section_that_is_not_a_table_is_told(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("train = 3\n")
    assert "train is a section, not a key" in message(DATA, "train.seed=1", config=str(file))


def test_a_file_that_is_not_toml_or_not_there(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[data\n")
    assert f"{file}: not a TOML file: " in message(config=str(file))
    for value in ("1" * 5000, "[" * 5000):
        file.write_text(f"[train]\nseed = {value}\n")
        assert f"{file}: not a TOML file: " in message(config=str(file))
    file.write_bytes(b"\xff\xfe")
    assert "cannot read config file" in message(config=str(file))
    assert message(config="quikstart").endswith("did you mean quickstart?")
    assert "no config file 'absent/x.toml'" in message(config="absent/x.toml")

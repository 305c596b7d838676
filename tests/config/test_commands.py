"""Every binding is read by the command and its engine, or refused with the name of its reader."""

import ast
import dataclasses
import typing
from pathlib import Path

import pytest

from manus_jax.config import commands, settings
from manus_jax.config.binding import ConfigError, setting_names
from manus_jax.config.binding import settings as settings_group
from manus_jax.config.commands import READS
from manus_jax.config.run_config import changed_settings, config_text, read_bindings
from manus_jax.errors import UserError
from manus_jax.models.transformer import REMAT_POLICIES
from manus_jax.rollout.build_rollout import (
    ENGINES,
    engine_kind,
    read_with_engine,
    unread_by_engine,
    with_engine_settings,
)

PACKAGE = Path(settings.__file__).parents[1]
GROUPS = {
    group.gin_name: group
    for group in vars(settings).values()
    if isinstance(group, type) and hasattr(group, "gin_name")
}
SETTINGS = sorted(setting_names(*GROUPS))
OF_ENGINES = setting_names("vllm")


@settings_group("own_group", of_engine=True)
class OwnGroup:
    volume: int = 1


REQUIRED = {
    "train": {"train.run_dir": "runs/x", "env.names": ["maze"]},
    "sft": {"sft.run_dir": "runs/x"},
    "evaluate": {"evaluate.out_dir": "x", "evaluate.policies": ["oracle"], "env.names": ["maze"]},
    "endpoint": {},
}
READ = {
    "train": commands.read_train_config,
    "sft": commands.read_sft_config,
    "evaluate": commands.read_evaluate_config,
    "endpoint": commands.read_endpoint_config,
}


def default_of(name):
    group, _, field = name.partition(".")
    found = next(f for f in dataclasses.fields(GROUPS[group]) if f.name == field)
    return found.default_factory() if found.default is dataclasses.MISSING else found.default


def read(command, bindings):
    return READ[command]([], [f"{name} = {value!r}" for name, value in bindings.items()])


@pytest.mark.parametrize("command", READ)
def test_every_binding_is_read_by_the_command_or_refused_with_its_reader(command):
    for name in SETTINGS:
        bindings = {name: default_of(name)} | REQUIRED[command]
        if name in READS[command] or (name in OF_ENGINES and command != "sft"):
            assert read(command, bindings)
            continue
        readers = [other for other, names in READS.items() if name in names]
        if name in OF_ENGINES:
            readers = ["train", "evaluate", "endpoint"]
        message = (
            f"{name} is set, but {command} does not read it; it is read by {', '.join(readers)}"
        )
        with pytest.raises(ConfigError) as caught:
            read(command, bindings)
        assert readers and str(caught.value) == message


@pytest.mark.parametrize("engine", ENGINES)
def test_every_binding_is_read_by_the_engine_or_refused_with_its_reader(engine):
    for name in sorted((READS["train"] | OF_ENGINES) - {"engine.name"}):
        where = {"vllm.servers": 1} if engine == "vllm" else {}
        given = where | {name: default_of(name)} | {"engine.name": engine} | REQUIRED["train"]
        if name == "vllm.servers":
            given["vllm.servers"] = 1
        config = read("train", given)
        if name not in unread_by_engine(engine):
            with_engine_settings(config)
            continue
        readers = [f"the engine {o!r}" for o in ENGINES if name in ENGINES[o].reads]
        with pytest.raises(ConfigError) as caught:
            with_engine_settings(config)
        assert str(caught.value) == (
            f"{name} is set, but the engine {engine!r} does not read it; it is read by "
            f"{', '.join(readers)}"
        )


def test_unread_settings_are_declared():
    assert "data.overlong" not in READS["train"] and "data.overlong" in READS["sft"]
    assert "engine.max_steps" in unread_by_engine("vllm")
    assert "vllm.servers" in unread_by_engine("jax")


def test_a_group_may_belong_to_one_engine_and_an_engine_reads_its_group_by_default():
    class Silent:
        on_learner_device = False

    with ENGINES.restored():
        ENGINES.register("own")(engine_kind(Silent, settings=OwnGroup)(lambda *given: None))
        assert setting_names("engine", "own_group") <= ENGINES["own"].reads
        given = {"own_group.volume": 3} | REQUIRED["train"]
        with pytest.raises(ConfigError, match=r"own_group\.volume .* by the engine 'own'"):
            with_engine_settings(read("train", given))
        chosen = with_engine_settings(read("train", given | {"engine.name": "own"}))
        assert chosen.engine_settings.volume == 3
        text = config_text(chosen, read_with_engine(READS["train"], "own"))
        assert "own_group.volume = 3" in text


def test_an_unknown_engine_is_named():
    with pytest.raises(UserError, match="unknown engine 'jaxx'; did you mean 'jax'"):
        with_engine_settings(read("train", REQUIRED["train"] | {"engine.name": "jaxx"}))


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_model_from_scratch_is_not_described_beside_a_path(command):
    given = REQUIRED[command] | {"model.path": "models/x"}
    assert read(command, given).scratch is None
    with pytest.raises(ConfigError, match=rf"scratch\.vocab_size is set, but {command} with model"):
        read(command, given | {"scratch.vocab_size": 300})


def attributes_read():
    """The names of all attributes that the code outside of config/ reads."""
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "config":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    yield node.attr


def test_every_setting_has_a_reader():
    spread = {f.name for f in dataclasses.fields(settings.MeshSettings)}  # make_mesh(**settings)
    used = {*attributes_read(), *spread}
    assert not [name for name in SETTINGS if name.partition(".")[2] not in used]


@pytest.mark.parametrize("command", READ)
def test_the_written_config_gives_the_same_settings_again(command, tmp_path):
    given = REQUIRED[command]
    more = {"env.urls": {"maze": ["http://10.0.0.7:36001"] * 4}, "rollout.top_p": 0.5}
    given = given | {name: value for name, value in more.items() if name in READS[command]}
    first = read(command, given)
    path = tmp_path / "config.gin"
    path.write_text(config_text(first, READS[command]))
    assert set(read_bindings(path.read_text())) == READS[command]
    assert READ[command]([str(path)], []) == first


@pytest.mark.parametrize("engine", ENGINES)
def test_the_written_config_holds_no_setting_that_the_engine_does_not_read(engine):
    where = {"vllm.servers": 1} if engine == "vllm" else {}
    config = read("train", REQUIRED["train"] | {"engine.name": engine} | where)
    config = with_engine_settings(config)
    text = config_text(config, read_with_engine(READS["train"], engine))
    assert ("vllm.servers" in read_bindings(text)) == (engine == "vllm")
    assert not unread_by_engine(engine) & set(read_bindings(text))


RUN = ("run_dir", "total_steps", "save_freq", "test_freq", "export")
RUN += ("keep_checkpoints", "strict_resume", "max_bad_updates")
MAY_CHANGE = {
    "algorithm.reference",
    "lora.export_merged",
    "optimizer.state",
    *setting_names("mesh", "distributed", "status", "compilation", "env_pool", "vllm"),
    *("engine.slots", "engine.cache_tokens", "engine.devices", "engine.tensor"),
    "engine.max_steps",
    *("env.urls", "env.servers_per_env", "env.python"),
    *("train.next_command", "train.tensorboard", "train.wandb_project", "train.profile_steps"),
    *(f"{group}.{field}" for group in ("train", "sft") for field in RUN),
}


def test_only_settings_that_do_not_affect_learning_may_change_on_resume():
    for name in SETTINGS:
        changed = changed_settings("", f"{name} = 'something else'")
        assert bool(changed) == (name not in MAY_CHANGE), name
        if changed:
            default = default_of(name)
            default = list(default) if isinstance(default, tuple) else default
            assert changed == [f"{name} was {default!r} and is 'something else'"]


def test_the_remat_policies_of_the_settings_are_those_of_the_model():
    remat = typing.get_type_hints(settings.ComputeSettings)["remat"]
    assert set(typing.get_args(remat)) == set(REMAT_POLICIES)


def test_config_imports_no_other_package_of_the_project():
    allowed = ("manus_jax.config", "manus_jax.errors", "manus_jax.limits")
    for path in (PACKAGE / "config").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("manus", "envs")):
                assert str(node.module).startswith(allowed), f"{path.name}: {node.module}"

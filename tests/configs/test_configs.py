"""Every config goes through its command's own code, up to where work would start.

What the command would then run is replaced, so that no model is loaded and no server started; what
it was given is checked as far as settings alone can be.
"""

import dataclasses
import re
from pathlib import Path

import pytest

from envs import registry
from manus_jax import evaluate, sft, train
from manus_jax.agentgym.table import ENVIRONMENTS
from manus_jax.config.binding import ConfigError
from manus_jax.learner.mesh import check_batch, make_mesh
from manus_jax.rewards import RewardSettings
from manus_jax.training import build as assembly
from manus_jax.training.build_rollout import check_play

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("configs/*.gin"))
HARDWARE = [p for p in CONFIGS if re.match(r"(ppo|grpo)_|base", p.name)]
COMMANDS = {
    "train": (train, "open_trainer"),
    "sft": (sft.supervised, "run"),
    "evaluate": (evaluate.comparison, "run"),
}


class Reached(Exception):
    """The command has read its settings."""


def settings_of(path, monkeypatch, *params):
    """What the command named in the config's header would run with."""
    header = path.read_text().partition("\n\n")[0]
    command = re.search(rf"python -m manus_jax\.(\w+) --gin_file=configs/{path.name}", header)[1]
    module, function = COMMANDS[command]

    def reached(settings, operative_config, *_):
        raise Reached(settings)

    monkeypatch.setattr(module, function, reached)
    main = {"train": train, "sft": sft, "evaluate": evaluate}[command].main
    if path.name.endswith("base.gin"):
        params = ("env.names = ['maze']", *params)
    with pytest.raises(Reached) as caught:
        main([f"--gin_file={path}", *(f"--gin_param={p}" for p in params)])
    return caught.value.args[0]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_binding_is_read_and_of_its_type_from_any_directory(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert settings_of(path, monkeypatch)


@pytest.mark.parametrize("path", HARDWARE, ids=lambda p: p.name)
def test_a_training_config_fits_together(path, monkeypatch):
    config = settings_of(path, monkeypatch)
    recipe = assembly.make_recipe(config.algorithm)
    assembly._check_sizes(config, recipe)
    RewardSettings(config.algorithm.reward, config.algorithm.reward_parameters)
    check_play(config.env, config.rollout)
    check_batch(
        config.data.rows, config.data.max_length, make_mesh(**dataclasses.asdict(config.mesh))
    )
    schedule = config.train.turns_schedule
    assert not schedule or schedule[-1] == config.rollout.max_turns
    assert config.train.batch_size % (config.algorithm.mini_batch_size or 1) == 0
    remote = [name for name in config.env.names if name not in registry.ENVIRONMENTS]
    assert [*config.env.urls] == remote
    assert bool(config.data.train_files) == bool(config.data.val_files) == bool(remote)


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_every_environment_has_a_config_for_ppo_and_grpo_and_both_play_alike(env, monkeypatch):
    ppo, grpo = (settings_of(ROOT / f"configs/{a}_{env}.gin", monkeypatch) for a in ("ppo", "grpo"))
    assert ppo.algorithm.recipe == "ppo" and grpo.algorithm.recipe == "grpo"
    for group in ("env", "rollout", "data", "model", "engine", "compute", "mesh", "optimizer"):
        assert getattr(ppo, group) == getattr(grpo, group)
    assert ppo.env.names == (env,)
    # PPO's episodes are each of another task; a step, and an update, has as many of them.
    episodes = [c.train.batch_size * c.train.group_size for c in (ppo, grpo)]
    updated = [c.algorithm.mini_batch_size * c.train.group_size for c in (ppo, grpo)]
    assert episodes[0] == episodes[1] and updated[0] == updated[1]
    assert ppo.algorithm.ppo_epochs == grpo.algorithm.ppo_epochs


@pytest.mark.parametrize("path", HARDWARE, ids=lambda p: p.name)
def test_the_first_of_eight_devices_holds_its_share_of_a_model_of_seven_billion(path, monkeypatch):
    config = settings_of(path, monkeypatch)
    recipe = assembly.make_recipe(config.algorithm)
    params = 7.62e9  # Qwen2.5-7B: 28 layers, 4 key-value heads of 128
    learned = params * (4 + 4 + 4 + 4) / 8  # weights, gradients, two moments
    held = learned * (2 if recipe.needs_critic else 1) + params * 4 / 8 * recipe.needs_reference
    copies = 2 * params * 2  # the engine's, old and new, while weights change hands
    a_token = 28 * 4 * 128 * 2 * 2  # keys and values in bfloat16
    cache = config.engine.slots * config.rollout.max_total_tokens * a_token
    assert held + copies + cache < 78e9
    assert config.rollout.max_in_flight <= config.engine.slots


def test_the_header_gives_command_hardware_and_what_to_expect():
    for path in HARDWARE:
        header = path.read_text().partition("\n\n")[0]
        assert "# Hardware: " in header and "not run on that hardware" in header, path.name


@pytest.mark.parametrize("path", HARDWARE[:1], ids=lambda p: p.name)
def test_a_misspelt_binding_on_top_of_a_config_is_an_error(path, monkeypatch):
    with pytest.raises(ConfigError, match="did you mean 'total_steps'"):
        settings_of(path, monkeypatch, "train.total_step = 3")


def written(tmp_path, **files):
    for name, text in files.items():
        (tmp_path / f"{name}.gin").write_text(text)
    return tmp_path


def total_steps(path, monkeypatch):
    monkeypatch.setattr(train, "open_trainer", lambda s, *_: (_ for _ in ()).throw(Reached(s)))
    with pytest.raises(Reached) as caught:
        train.main([f"--gin_file={path}", "--gin_param=env.names = ['maze']"])
    return caught.value.args[0].train.total_steps


def test_an_include_is_found_beside_its_file_and_lines_after_it_win(tmp_path, monkeypatch):
    inner = tmp_path / "inner"
    inner.mkdir()
    written(inner, base="train.run_dir = 'a'\ntrain.total_steps = 7\n")
    written(inner, middle="include 'base.gin'\n")
    top = written(tmp_path, before="train.total_steps = 9\ninclude 'inner/middle.gin'  # all\n")
    written(tmp_path, after='include "inner/middle.gin"\ntrain.total_steps = 9\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    written(elsewhere, base="train.total_steps = 5\n")  # another one, where the command is run
    monkeypatch.chdir(elsewhere)
    assert total_steps(top / "before.gin", monkeypatch) == 7
    assert total_steps(top / "after.gin", monkeypatch) == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("include 'gone.gin'\n", r"top\.gin includes .*gone\.gin, which does not exist"),
        ("include 'top.gin'\n", r"top\.gin includes itself"),
        ("import no_such_module\n", "No module named 'no_such_module'"),
        ("train.seed = 1\n\ntrain.seed = )\n", r"top\.gin, line 3"),
    ],
)
def test_files_that_cannot_be_read_are_one_line(tmp_path, text, message):
    written(tmp_path, top=text)
    with pytest.raises(ConfigError, match=message) as caught:
        train.main([f"--gin_file={tmp_path / 'top.gin'}"])
    assert "\n" not in str(caught.value)

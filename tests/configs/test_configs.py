"""Every config goes through its command's own code, up to the point where work would start.

What the command would then run is replaced, so that no model is loaded and no server started; the
settings that it receives are checked as far as they can be without either.
"""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import jax
import pytest

from envs import registry
from envs.sqlgym.tasks import items, questions
from manus_jax import evaluate, plan, sft, traces, train
from manus_jax.agentgym.table import ENVIRONMENTS
from manus_jax.config.binding import ConfigError
from manus_jax.learner.mesh import check_batch, make_mesh
from manus_jax.planning import report as planning_report
from manus_jax.rewards import RewardSettings
from manus_jax.rollout.build_rollout import check_play
from manus_jax.training.learner_specs import make_recipe
from manus_jax.training.run_checks import check_sizes

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("configs/**/*.gin"))
RECIPES = ("ppo", "grpo")
MODULES = {"train": train, "sft": sft, "evaluate": evaluate, "traces": traces, "plan": plan}
WORK = {
    "train": (train, "open_trainer"),
    "sft": (sft.supervised, "run"),
    "evaluate": (evaluate.comparison, "run"),
    "traces": (traces, "write_traces"),
    "plan": (planning_report, "make_plan"),
}


class Reached(Exception):
    """The command has read its settings."""


def settings_of(command, arguments, monkeypatch):
    """The settings that a command would run with; paths in `arguments` are below the root."""

    def reached(settings, *_):
        raise Reached(settings)

    monkeypatch.setattr(*WORK[command], reached)
    with pytest.raises(Reached) as caught:
        MODULES[command].main(
            [a.replace("--gin_file=configs/", f"--gin_file={ROOT}/configs/") for a in arguments]
        )
    return caught.value.args[0]


def composed(env, recipe, monkeypatch, *params):
    """The settings of an environment with a recipe on one TPU host; "base" is an environment
    without a file of its own."""
    file = "base" if env == "base" else f"envs/{env}"
    params = ("env.names = ['maze']", *params) if env == "base" else params
    names = (file, f"recipes/{recipe}", "hardware/tpu_host")
    arguments = [f"--gin_file=configs/{name}.gin" for name in names]
    return settings_of("train", [*arguments, *(f"--gin_param={p}" for p in params)], monkeypatch)


def header_commands(path):
    """The `python -m manus_jax.…` commands in a config's header, as (command, arguments)."""
    header = (ROOT / path).read_text().partition("\n\n")[0]
    lines = [line[4:] for line in header.splitlines() if line.startswith("#   ")]
    text = "\n".join(lines).replace("\\\n", " ")
    found = re.findall(r"^(?:\w+=\S+ +)?python -m manus_jax\.(\w+) (.*)$", text, re.MULTILINE)
    return [(command, shlex.split(arguments)) for command, arguments in found]


@pytest.mark.parametrize("path", CONFIGS)
def test_the_header_has_a_command_that_takes_the_config(path):
    assert any(f"--gin_file={path}" in arguments for _, arguments in header_commands(path))


@pytest.mark.bug("B22")
@pytest.mark.parametrize(
    "path, command, arguments", [(p, *found) for p in CONFIGS for found in header_commands(p)]
)
def test_every_binding_is_read_and_of_its_type_from_any_directory(
    path, command, arguments, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert settings_of(command, arguments, monkeypatch)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("env", ["base", *ENVIRONMENTS])
def test_a_training_config_fits_together(env, recipe, monkeypatch):
    config = composed(env, recipe, monkeypatch)
    recipe = make_recipe(config.algorithm)
    check_sizes(config, recipe)
    RewardSettings(config.algorithm.reward, config.algorithm.reward_parameters)
    check_play(config.env, config.rollout)
    mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=jax.devices()[:4])
    check_batch(config.data.rows, config.data.max_length, mesh)
    schedule = config.train.turns_schedule
    assert not schedule or schedule[-1] == config.rollout.max_turns
    assert config.train.batch_size % (config.algorithm.mini_batch_size or 1) == 0
    remote = [name for name in config.env.names if name not in registry.ENVIRONMENTS]
    assert [*config.env.urls] == remote
    assert bool(config.data.train_files) == bool(config.data.val_files) == bool(remote)


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_ppo_and_grpo_differ_in_the_algorithm_alone(env, monkeypatch):
    ppo, grpo = (composed(env, recipe, monkeypatch) for recipe in RECIPES)
    assert ppo.algorithm.recipe == "ppo" and grpo.algorithm.recipe == "grpo"
    for group in ("env", "rollout", "data", "model", "engine", "compute", "mesh", "optimizer"):
        assert getattr(ppo, group) == getattr(grpo, group)
    assert ppo.env.names == (env,)
    episodes = [c.train.batch_size * c.train.group_size for c in (ppo, grpo)]
    updated = [c.algorithm.mini_batch_size * c.train.group_size for c in (ppo, grpo)]
    assert episodes[0] == episodes[1] and updated[0] == updated[1]
    assert ppo.algorithm.ppo_epochs == grpo.algorithm.ppo_epochs
    assert [c.train.run_dir for c in (ppo, grpo)] == [f"runs/ppo_{env}", f"runs/grpo_{env}"]


@pytest.mark.parametrize("env", ["base", *ENVIRONMENTS])
def test_the_first_of_four_chips_holds_its_share_of_a_model_of_seven_billion(env, monkeypatch):
    config = composed(env, "grpo", monkeypatch)
    recipe = make_recipe(config.algorithm)
    params = 7.62e9  # Qwen2.5-7B: 28 layers, 4 key-value heads of 128
    learned = params * (4 + 4 + 4 + 4) / 4  # weights, gradients, two moments
    held = learned + params * 4 / 4 * recipe.needs_reference
    copies = 2 * params * 2  # the engine's old and new weights during an update
    a_token = 28 * 4 * 128 * 2 * 2  # keys and values in bfloat16
    assert config.engine.cache_tokens
    cache = config.engine.cache_tokens / 4 * a_token
    assert held + copies + cache < 95e9
    assert config.rollout.max_in_flight <= config.engine.slots


def test_a_misspelt_binding_on_top_of_a_config_is_an_error(monkeypatch):
    with pytest.raises(ConfigError, match="did you mean 'total_steps'"):
        composed("base", "grpo", monkeypatch, "train.total_step = 3")


def test_later_files_and_then_params_override_earlier_ones(tmp_path, monkeypatch):
    written(tmp_path, a="train.total_steps = 1\ntrain.seed = 1\ntrain.run_dir = '{env}/{recipe}'\n")
    written(tmp_path, b="train.total_steps = 2\ntrain.seed = 2\nenv.names = ['maze', 'wordle']\n")
    files = [f"--gin_file={tmp_path}/{name}.gin" for name in "ab"]
    config = settings_of("train", [*files, "--gin_param=train.seed = 3"], monkeypatch)
    assert (config.train.total_steps, config.train.seed) == (2, 3)
    assert config.train.run_dir == "maze_wordle/grpo"


def written(tmp_path, **files):
    for name, text in files.items():
        (tmp_path / f"{name}.gin").write_text(text)
    return tmp_path


def total_steps(path, monkeypatch):
    arguments = [f"--gin_file={path}", "--gin_param=env.names = ['maze']"]
    return settings_of("train", arguments, monkeypatch).train.total_steps


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


def test_learn_sqlgym_plays_questions_without_numbers_and_holds_out_others():
    easy = {
        f"sqlgym_{item}": (question.database.name, question.text)
        for item, question in enumerate(questions())
        if not re.search(r"\d", re.sub(r"LIMIT \d", "", question.sql))
        and "INTERSECT" not in question.sql
    }
    tasks = {}
    for split in ("train", "test"):
        file = ROOT / "configs" / "tasks" / f"sqlgym_words_{split}.json"
        tasks[split] = json.loads(file.read_text())
        names = [f"sqlgym_{item}" for item in items(split)]
        assert tasks[split] == [name for name in names if name in easy]
    assert not {easy[name] for name in tasks["train"]} & {easy[name] for name in tasks["test"]}

"""Environments, recipes and hardware are independent: every combination reads, and every hardware
file divides over the devices that it is for, with the two models that it is for.
"""

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import pytest
from mesh_devices import HARDWARE

from manus_jax.agentgym.environments import environment
from manus_jax.algorithms.recipes import RECIPES
from manus_jax.config.commands import read_train_config
from manus_jax.learner.mesh import batch_shards, check_batch, check_model, make_mesh
from manus_jax.models.attention import pick_implementation
from manus_jax.planning.architectures import find_architecture
from manus_jax.rollout.build_rollout import check_play, embedded_decoder, with_engine_settings
from manus_jax.rollout.strategies.registry import StrategyError, declared
from manus_jax.training.learner_specs import make_recipe
from manus_jax.training.run_checks import check_sizes

ROOT = Path(__file__).parents[2]
# Those of the project; other tests may have registered more.
ENVIRONMENTS = sorted(p.stem for p in (ROOT / "manus_jax/agentgym/prompts").glob("*.toml"))
MODELS = ("qwen2.5-7b", "qwen3-8b")
PUBLISHED = sorted((ROOT / "configs" / "published").glob("*.gin"))
# The only settings that hardware files set, by binding or by group.
OF_HARDWARE = {
    *("mesh", "vllm", "compute.remat", "data.rows", "data.max_length"),
    *("engine.name", "engine.slots", "engine.cache_tokens"),
    *("rollout.max_in_flight", "algorithm.reference"),
}


@functools.cache
def mesh_of(hardware):
    settings = composed("textcraft", "grpo", hardware).mesh
    return make_mesh(**dataclasses.asdict(settings), devices=HARDWARE[hardware][0]())


def composed(env, recipe, hardware):
    names = (f"envs/{env}", f"recipes/{recipe}", f"hardware/{hardware}")
    files = [f"{ROOT}/configs/{name}.gin" for name in names]
    return with_engine_settings(read_train_config(files, []))


def check(env, recipe, hardware):
    config = composed(env, recipe, hardware)
    assert config.env.names == (env,)
    made = make_recipe(config.algorithm)
    assert made.name == recipe
    check_sizes(config, made)
    check_play(config.env, config.rollout)
    mesh = mesh_of(hardware)
    kernel = pick_implementation(mesh.devices.flat[0].platform)
    check_batch(config.data.rows, config.data.max_length, mesh, kernel)
    assert config.train.run_dir == f"runs/{recipe}_{env}"


def bound(pattern):
    text = "\n".join(p.read_text() for p in ROOT.glob(f"configs/{pattern}.gin"))
    return set(re.findall(r"^([\w.]+) =", text, re.MULTILINE))


def test_every_recipe_and_every_environment_has_a_file_and_every_machine_its_devices():
    names = lambda folder: {p.stem for p in (ROOT / "configs" / folder).glob("*.gin")}
    assert names("recipes") == set(RECIPES)
    assert names("envs") == set(ENVIRONMENTS)
    assert names("hardware") == set(HARDWARE)


def test_environments_recipes_and_hardware_set_different_things():
    axes = [bound("recipes/*"), bound("envs/*") | bound("base"), bound("hardware/*")]
    assert all(axes)
    for one, other in itertools.combinations(axes, 2):
        assert not one & other
    of_hardware = {b for b in axes[2] if {b, b.partition(".")[0]} & OF_HARDWARE}
    assert axes[2] == of_hardware
    for file in ROOT.glob("configs/hardware/*.gin"):
        set_here = set(re.findall(r"^([\w.]+) =", file.read_text(), re.MULTILINE))
        assert {"compute.remat", "data.rows", "data.max_length", "rollout.max_in_flight"} < set_here


@pytest.mark.parametrize("hardware", HARDWARE)
def test_every_environment_and_every_recipe_runs_on_it(hardware):
    for env in ENVIRONMENTS:
        check(env, "grpo", hardware)
    for recipe in RECIPES:
        check("textcraft", recipe, hardware)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", HARDWARE)
def test_every_combination_runs_on_it(hardware):
    for env, recipe in itertools.product(ENVIRONMENTS, RECIPES):
        config = composed(env, recipe, hardware)
        if declared(config.rollout.strategy).replays and environment(env).lasting_effects:
            with pytest.raises(StrategyError, match=f"actions in {env} have effects that last"):
                check(env, recipe, hardware)
        else:
            check(env, recipe, hardware)


@pytest.mark.parametrize("hardware", ("gpus_one_host", "tpu_v5e_64"))
@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_recipes_run_on_it_with_their_models(path, hardware):
    machine = ROOT / "configs" / "hardware" / f"{hardware}.gin"
    config = with_engine_settings(read_train_config([str(path), str(machine)], []))
    check_sizes(config, make_recipe(config.algorithm))
    check_play(config.env, config.rollout)
    mesh = mesh_of(hardware)
    kernel = pick_implementation(mesh.devices.flat[0].platform)
    check_batch(config.data.rows, config.data.max_length, mesh, kernel)
    for model in ("qwen2.5-1.5b", "qwen2.5-7b"):
        check_model(find_architecture(model), mesh, kernel)
    last = config.train.turns_schedule[-1:] or (config.rollout.max_turns,)
    assert last == (config.rollout.max_turns,)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("hardware", HARDWARE)
def test_the_models_divide_over_its_devices(hardware, model):
    mesh = mesh_of(hardware)
    kernel = pick_implementation(mesh.devices.flat[0].platform)
    arch, config = find_architecture(model), composed("textcraft", "grpo", hardware)
    check_model(arch, mesh, kernel)
    assert mesh.devices.size == len(HARDWARE[hardware][0]())
    if config.engine.name == "jax":  # its cache is bounded by tokens
        layout = embedded_decoder(config.engine, arch, config.data.max_length, mesh).layout
        assert layout.pages * layout.page_length * layout.copies == config.engine.cache_tokens


@pytest.mark.parametrize("hardware", HARDWARE)
def test_one_row_per_shard_and_no_more_episodes_than_an_embedded_engine_can_hold(hardware):
    config = composed("textcraft", "grpo", hardware)
    assert config.data.rows == batch_shards(mesh_of(hardware))
    if config.engine.name == "jax":
        assert config.rollout.max_in_flight <= config.engine.slots
    else:  # a step's episodes are all in flight
        assert config.rollout.max_in_flight >= 64

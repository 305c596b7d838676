"""Checks the settings of a run before anything is started or written, in order of cost.

Names and sizes come first, then files, the mesh, tasks and rewards, the model's config and
tokenizer, the memory, and servers that others have started. What the checks read is kept for
building the run.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from manus_jax.agentgym.environments import check_items
from manus_jax.agentgym.table import environment
from manus_jax.algorithms.recipes import Recipe
from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import TrainConfig
from manus_jax.config.settings import EngineSettings, RolloutSettings, TrainSettings
from manus_jax.data.chat import CHATML
from manus_jax.data.chat_template import template_arguments
from manus_jax.data.mixture import Mixture, Sources
from manus_jax.engines.layout import split_devices
from manus_jax.evaluation.eval_sets import EvalSet
from manus_jax.learner.mesh import check_model
from manus_jax.models import loading
from manus_jax.models.architecture import Architecture
from manus_jax.models.lora import Lora, make_lora
from manus_jax.rewards import RewardSettings
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.baseline_players import OraclePolicy, RandomPolicy
from manus_jax.rollout.build_rollout import ENGINES, check_play, embedded_decoder
from manus_jax.rollout.llm_player import ChatTokenizer
from manus_jax.rollout.player import Agent
from manus_jax.rollout.recorded import RecordedError, read_recorded
from manus_jax.rollout.strategies import check_strategy_service, episodes_per_spec
from manus_jax.rollout.trajectory import Trajectory
from manus_jax.training.job import Job
from manus_jax.training.learner_specs import (
    check_experts,
    check_lengths,
    check_memory,
    check_reference,
    make_recipe,
    open_mesh,
    replays_experts,
)
from manus_jax.training.metric_sinks import check_sinks
from manus_jax.training.task_sources import read_task_sources
from manus_jax.training.warm_start import check_oracle, uses_oracle

_TRIED_TASKS = 1000  # of each source, with the reward function


@dataclasses.dataclass(frozen=True)
class CheckedRun:
    """What the checks of a run have read and made.

    `devices` are the learner's, None: all. `engine` are the engine's settings with its tensor axis;
    `send_adapters` says whether the engine gets LoRA adapters instead of whole models. `recorded`
    are the episodes to train on, on process 0 only.
    """

    recipe: Recipe
    reward: RewardSettings
    devices: Sequence[Any] | None
    mesh: Mesh
    sources: Sources
    mixture: Mixture
    eval_set: EvalSet
    baselines: dict[str, Agent]
    recorded: list[Trajectory]
    engine: EngineSettings
    send_adapters: bool


def check_run(config: TrainConfig, job: Job) -> CheckedRun:
    """Raises the first error that the settings of a run have."""
    train, rollout = config.train, config.rollout
    recipe = make_recipe(config.algorithm)
    check_sizes(config, recipe)
    check_reference(config)
    check_sinks(train)
    reward = RewardSettings(config.algorithm.reward, config.algorithm.reward_parameters)
    check_play(config.env, rollout)
    check_oracle(config)
    if config.model.path is not None:
        loading.require_path(Path(config.model.path))
    devices, engine_devices = split_devices(config.engine.devices)
    mesh, compute = open_mesh(config.mesh, config.compute, config.data, devices)
    job.on_primary(lambda: _check_items(config))
    sources, eval_set = read_task_sources(config.data, config.env, train.val_tasks)
    mixture = Mixture(sources, train.seed, config.data.stage_tasks)
    if config.algorithm.on_reward_error == "raise":
        _try_reward(reward, sources)
    baselines = _baselines(train, eval_set, rollout)
    arch, tokenizer = _check_model(config)
    check_experts(config.model, arch, replays_experts(config))
    check_model(arch, mesh, compute.kernel.implementation)
    lora = make_lora(config.lora, arch)
    recorded = _read_recorded(config, arch, tokenizer, job) if train.trajectories else []
    engine = dataclasses.replace(config.engine, tensor=config.engine.tensor or mesh.shape["tensor"])
    _check_memory(config, arch, mesh, engine, engine_devices, lora)
    kind = ENGINES[config.engine.name]
    send_adapters = lora is not None and kind.takes_adapters(config.engine_settings)
    job.on_primary(lambda: _check_engine(config, arch, send_adapters))
    job.on_primary(lambda: _check_services(reward, rollout))
    return CheckedRun(
        recipe=recipe,
        reward=reward,
        devices=devices,
        mesh=mesh,
        sources=sources,
        mixture=mixture,
        eval_set=eval_set,
        baselines=baselines,
        recorded=recorded,
        engine=engine,
        send_adapters=send_adapters,
    )


def check_sizes(config: TrainConfig, recipe: Recipe) -> None:
    """Raises ConfigError if the lengths, group sizes and batch sizes are inconsistent."""
    check_lengths(config)
    if config.rollout.temperature == 0 and not config.train.val_only:
        raise ConfigError(
            "rollout.temperature = 0 always plays the most likely tokens, and training needs "
            "episodes that differ; train.val_temperature is the temperature of validations"
        )
    episodes = config.train.group_size * episodes_per_spec(config.rollout)
    if recipe.needs_groups and episodes < 2:
        raise ConfigError(
            f"recipe {recipe.name} compares episodes of one task with each other: "
            "train.group_size must be at least 2"
        )
    warm_start = config.warm_start
    by_random = round(warm_start.random_share * warm_start.traces)
    if warm_start.steps and warm_start.random_share < 1 and by_random == warm_start.traces:
        raise ConfigError(
            f"warm_start.random_share = {warm_start.random_share} of warm_start.traces = "
            f"{warm_start.traces} leaves no episode to the oracle"
        )
    if warm_start.steps and config.rollout.prompt_source == "per_turn":
        raise ConfigError(
            "a warm start fine-tunes on conversations, and with rollout.prompt_source = 'per_turn' "
            "there are none: set warm_start.steps to 0"
        )
    if config.model.path is None and warm_start.steps == 0:
        raise ConfigError(
            "model.path is not set, and a model from scratch cannot play: set warm_start.steps to "
            "fine-tune it on oracle episodes first"
        )


def _check_items(config: TrainConfig) -> None:
    """Raises if a part of the run needs items that the servers in env.urls do not have."""
    needed_by = {
        "data.train_files is empty": not config.data.train_files,
        "train.baselines has 'oracle'": "oracle" in config.train.baselines,
        "warm_start.steps > 0 uses the oracle": uses_oracle(config.warm_start),
    }
    for purpose, needed in needed_by.items():
        if needed:
            check_items(config.env.urls, config.env_pool, purpose)


def _try_reward(reward: RewardSettings, sources: Sources) -> None:
    for task in itertools.chain.from_iterable(tasks[:_TRIED_TASKS] for _, tasks, _ in sources):
        reward.try_task(task.item_id, task.ground_truth, env=task.env, extra=task.extra)


def _baselines(
    train: TrainSettings, eval_set: EvalSet, rollout: RolloutSettings
) -> dict[str, Agent]:
    made: dict[str, Agent] = {"oracle": OraclePolicy(), "random": RandomPolicy(train.seed)}
    for name in train.baselines:
        for env in eval_set.environments:
            try:
                made[name].check(env, rollout)
            except ValueError as error:
                raise ConfigError(f"train.baselines: {error}") from None
    return made


def _check_model(config: TrainConfig) -> tuple[Architecture, PreTrainedTokenizerBase | None]:
    """The architecture, and the tokenizer of a model that exists.

    Raises if its chat template cannot show what the environments need.
    """
    rollout = config.rollout
    if config.model.path is not None:
        source = loading.from_path(Path(config.model.path))
        chat_tokenizer = ChatTokenizer(source.tokenizer, config.chat)
        for env in config.env.names:
            chat_tokenizer.check(env, rollout)
        return source.card.architecture, source.tokenizer
    assert config.scratch is not None
    arch = loading.scratch_architecture(config.scratch)
    template_arguments(CHATML, config.chat)
    if any(format_for(environment(n), rollout.action_format).tools for n in config.env.names):
        raise ConfigError(
            f"rollout.action_format = {rollout.action_format!r} needs a model whose chat "
            "template shows tools; that of a model from scratch does not"
        )
    return arch, None


def _read_recorded(
    config: TrainConfig, arch: Architecture, tokenizer: PreTrainedTokenizerBase | None, job: Job
) -> list[Trajectory]:
    """The episodes of `train.trajectories`, on process 0."""
    if tokenizer is None:
        raise ConfigError("train.trajectories needs model.path: a model with their tokenizer")
    own, paths = Path(config.train.run_dir).expanduser().resolve(), config.train.trajectories
    for listed in paths:
        if Path(listed).expanduser().resolve().is_relative_to(own):
            raise RecordedError(
                f"train.trajectories: {listed} is in train.run_dir, where this run writes its "
                "own; choose another run_dir"
            )
    length, vocabulary = config.data.max_length, tokenizer.get_vocab()
    read = lambda: read_recorded(paths, length, arch.vocab_size, vocabulary)
    return job.on_primary(read) or []


def _check_memory(
    config: TrainConfig,
    arch: Architecture,
    mesh: Mesh,
    engine: EngineSettings,
    engine_devices: Sequence[Any],
    lora: Lora | None,
) -> None:
    engine_bytes = 0  # on the learner's devices
    if ENGINES[engine.name].engine.on_learner_device:
        length = config.rollout.max_total_tokens
        layout = embedded_decoder(engine, arch, length, mesh, engine_devices).layout
        engine_bytes = 0 if engine_devices else layout.device_bytes * layout.mesh.size
    frozen_itemsize = 0 if lora is None else 2 if config.compute.dtype == "bfloat16" else 4
    check_memory(arch, config.data, mesh, engine_bytes, frozen_itemsize)


def _check_services(reward: RewardSettings, rollout: RolloutSettings) -> None:
    """Raises if a server that scores or selects episodes does not answer."""
    reward.check_service()
    check_strategy_service(rollout)


def _check_engine(config: TrainConfig, arch: Architecture, send_adapters: bool) -> None:
    path = config.model.path
    served = None if path is None else arch  # a tokenizer may still change it
    rank = config.lora.rank if send_adapters else None
    base = None if rank is None or path is None or config.warm_start.steps else Path(path)
    length = config.rollout.max_total_tokens
    ENGINES[config.engine.name].check(config.engine_settings, length, served, rank, base)

"""Builds a trainer from settings: checks, creates and connects all parts of a run.

Settings are checked first, in order of cost: names, sizes, files, the mesh. The servers, the warm
start, the weights and the engine follow in that order. With several processes, all of them run this
code; servers, engine and everything else that rollouts need exist on process 0 only.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax

from manus_jax.agentgym.environments import check_items
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.algorithms.recipes import Recipe
from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import READS, SftConfig, TrainConfig
from manus_jax.config.run_config import config_text
from manus_jax.config.settings import (
    DataSettings,
    EnvSettings,
    RolloutSettings,
    SftSettings,
    TrainSettings,
)
from manus_jax.data.mixture import Mixture
from manus_jax.data.tasks import Task, read_tasks, without
from manus_jax.evaluation.eval_sets import EvalSet, make_eval_set, playable_tasks, split_tasks
from manus_jax.evaluation.play import evaluate_policy
from manus_jax.files import write_atomically
from manus_jax.learner.learner import Learner, Reference
from manus_jax.learner.mesh import check_batch, check_model, make_mesh, param_shardings
from manus_jax.learner.update import require_finite
from manus_jax.models import loading
from manus_jax.models.attention import check_platform
from manus_jax.models.loading import PolicySource
from manus_jax.models.transformer import critic_from_policy, make_compute
from manus_jax.rewards import RewardSettings
from manus_jax.rollout.baseline_players import OraclePolicy, RandomPolicy
from manus_jax.rollout.build_rollout import (
    ENGINES,
    check_play,
    embedded_decoder,
    open_engine,
    open_servers,
)
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.player import Agent
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.traces import conversation_of
from manus_jax.rollout.trajectory import episode_specs, trajectories
from manus_jax.training import supervised
from manus_jax.training.checkpoints import Checkpoints
from manus_jax.training.failures import first_error
from manus_jax.training.job import Job
from manus_jax.training.learner_specs import (
    check_lengths,
    check_memory,
    critic_spec,
    make_recipe,
    policy_lr,
    policy_spec,
)
from manus_jax.training.metric_sinks import check_sinks
from manus_jax.training.rollouts import Rollouts
from manus_jax.training.run_directory import RunDirectory
from manus_jax.training.trainer import Trainer
from manus_jax.vllm.open_pool import check_servers
from manus_jax.weights.host_tensors import gather_to_host

_TRACES = "traces.jsonl"
Sources = list[tuple[str, list[Task], float]]


def read_task_sources(
    data: DataSettings, env: EnvSettings, val_tasks: int
) -> tuple[Sources, EvalSet]:
    """The weighted sources of training tasks, and the evaluation set of held-out tasks."""
    # Without training files, training has checked that all servers have these items.
    own_items = not data.train_files
    eval_set = make_eval_set(env, val_tasks, data.val_files, own_items=own_items)
    if not data.train_files:
        every = 10**9
        sources = [(name, split_tasks(name, "train", every), 1.0) for name in env.names]
        return sources, eval_set
    held_out = read_tasks(data.val_files) if data.val_files else []
    sources = []
    playable = playable_tasks(data.train_files, env)
    for index, (path, listed) in enumerate(zip(data.train_files, playable, strict=True)):
        tasks = without(listed, held_out)
        weight = data.train_weights[index] if data.train_weights else float(max(1, len(tasks)))
        sources.append((f"{index}:{Path(path).name}", tasks, weight))
    return sources, eval_set


def check_sizes(config: TrainConfig, recipe: Recipe) -> None:
    """Raises ConfigError if the lengths, group sizes and batch sizes are inconsistent."""
    check_lengths(config)
    if config.algorithm.critic_warmup and not recipe.needs_critic:
        raise ConfigError(
            f"algorithm.critic_warmup = {config.algorithm.critic_warmup}, and recipe {recipe.name} "
            "has no critic"
        )
    if recipe.needs_groups and config.train.group_size < 2:
        raise ConfigError(
            f"recipe {recipe.name} compares episodes of one task with each other: "
            "train.group_size must be at least 2"
        )
    warm_start = config.warm_start
    if warm_start.steps and round(warm_start.random_share * warm_start.traces) == warm_start.traces:
        raise ConfigError(
            f"warm_start.random_share = {warm_start.random_share} of warm_start.traces = "
            f"{warm_start.traces} leaves no episode to the oracle"
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
        "warm_start.steps > 0 uses the oracle": config.warm_start.steps > 0,
    }
    for purpose, needed in needed_by.items():
        if needed:
            check_items(config.env.urls, config.env_pool, purpose)


def _baselines(
    train: TrainSettings, eval_set: EvalSet, rollout: RolloutSettings
) -> dict[str, Agent]:
    made: dict[str, Agent] = {"oracle": OraclePolicy(), "random": RandomPolicy(train.seed)}
    for name in train.baselines:
        if name not in made:
            raise ConfigError(f"train.baselines has {name!r}; there are oracle and random")
        for env in eval_set.environments:
            try:
                made[name].check(env, rollout)
            except ValueError as error:
                raise ConfigError(f"train.baselines: {error}") from None
    return made


def play_traces(
    config: TrainConfig, directory: RunDirectory, sources: Sources, pool: EnvironmentPool | None
) -> None:
    """Plays episodes of the training tasks and writes them as conversations for fine-tuning.

    The oracle and the random policy use the same prompts and formats as the model.
    """
    assert pool is not None
    settings = config.warm_start
    traces = directory.warm_start / _TRACES
    if traces.exists():
        return
    traces.parent.mkdir(exist_ok=True)
    tasks = Mixture(sources, config.train.seed).next_batch(settings.traces)
    random_tasks = round(settings.random_share * len(tasks))
    specs = episode_specs(tasks)
    policy = RandomPolicy(config.train.seed)
    random_episodes = run_episodes(specs[:random_tasks], policy, pool, config.rollout)
    # The oracle plays every task to its end, even if the turn limit of the agent is lower.
    unlimited = dataclasses.replace(config.rollout, max_turns=1000)
    demonstrations = run_episodes(specs[random_tasks:], OraclePolicy(), pool, unlimited)
    kept = [t for t in trajectories(demonstrations) if t.success]
    if not kept:
        raise ConfigError(
            f"the oracle won none of {len(demonstrations)} training tasks. "
            + first_error(demonstrations)
        )
    kept += trajectories(random_episodes)
    lines = (
        json.dumps({"item_id": t.task.item_id, "conversations": conversation_of(t)}) + "\n"
        for t in kept
    )
    write_atomically(traces, "".join(lines))


def warm_start(config: TrainConfig, directory: RunDirectory, job: Job) -> Path:
    """Fine-tunes on the traces; returns the path of the resulting model."""
    settings = config.warm_start
    export = job.count == 1  # with several processes, each reads its shards of the checkpoint
    sft = SftSettings(
        run_dir=str(directory.warm_start),
        total_steps=settings.steps,
        batch_size=settings.batch_size,
        seed=config.train.seed,
        save_freq=settings.steps,
        test_freq=settings.steps,
        max_bad_updates=config.train.max_bad_updates,
        strict_resume=config.train.strict_resume,
        export=export,
    )
    optimizer = dataclasses.replace(
        config.optimizer,
        lr=settings.lr,
        schedule="cosine",
        warmup_steps=max(1, settings.steps // 20),
        min_lr_ratio=0.1,
    )
    data = dataclasses.replace(
        config.data,
        train_files=(str(directory.warm_start / _TRACES),),
        train_weights=(),
        val_files=(),
        overlong="cut",
    )
    fine_tuning = SftConfig(
        sft, data, config.model, config.scratch, optimizer, config.mesh, config.compute
    )
    # A relative path, so that the run directory can be moved.
    written = dataclasses.replace(
        fine_tuning, data=dataclasses.replace(data, train_files=(_TRACES,))
    )
    supervised.run(fine_tuning, config_text(written, READS["sft"]), job)
    return directory.warm_start / "export" / str(settings.steps) if export else directory.warm_start


@contextlib.contextmanager
def open_trainer(config: TrainConfig, operative_config: str, job: Job) -> Iterator[Trainer]:
    """Opens a trainer; its servers and engine are closed at the end of the block."""
    train, data = config.train, config.data
    recipe = make_recipe(config.algorithm)
    check_sizes(config, recipe)
    check_sinks(train)
    reward = RewardSettings(config.algorithm.reward, config.algorithm.reward_parameters)
    rollout = config.rollout
    check_play(config.env, rollout)
    if config.model.path is not None:
        loading.require_path(Path(config.model.path))
    mesh = make_mesh(**dataclasses.asdict(config.mesh))
    kernel = make_compute(**dataclasses.asdict(config.compute), mesh=mesh).kernel
    check_platform(kernel.implementation, mesh)
    check_batch(data.rows, data.max_length, mesh, kernel.implementation)
    job.on_primary(lambda: _check_items(config))
    sources, eval_set = read_task_sources(data, config.env, train.val_tasks)
    mixture = Mixture(sources, train.seed)
    baselines = _baselines(train, eval_set, rollout)
    if config.model.path is not None:
        arch = loading.from_path(Path(config.model.path)).card.architecture
    else:
        assert config.scratch is not None
        arch = loading.scratch_architecture(config.scratch)
    check_model(arch, mesh, kernel.implementation)
    held = 0
    engine_settings = dataclasses.replace(
        config.engine, tensor=config.engine.tensor or mesh.shape["tensor"]
    )
    if ENGINES[config.engine.name].engine.on_learner_device:
        layout = embedded_decoder(engine_settings, arch, rollout.max_total_tokens, mesh).layout
        held = layout.device_bytes * layout.mesh.size
    check_memory(arch, data, mesh, held)
    served = None if config.model.path is None else arch  # a tokenizer may still change it
    job.on_primary(lambda: check_servers(config.engine_settings, rollout.max_total_tokens, served))
    opened = job.on_primary(lambda: RunDirectory(train.run_dir, operative_config))
    directory = opened or RunDirectory(train.run_dir, "")

    with contextlib.ExitStack() as stack:
        pool = job.on_primary(
            lambda: stack.enter_context(open_servers(config.env, config.env_pool))
        )
        path = config.model.path
        if config.warm_start.steps:
            job.on_primary(lambda: play_traces(config, directory, sources, pool))
            path = str(warm_start(config, directory, job))
        assert path is not None
        loaded = loading.from_path(Path(path))
        source = job.on_primary(lambda: loaded.keep_card(directory.model)) or loaded
        learners, reference = build_learners(config, recipe, source, mesh)
        checkpoints = Checkpoints(
            directory.checkpoints,
            keep=train.keep_checkpoints,
            parts=tuple(learners),
            best=True,
            strict=train.strict_resume,
            job=job,
        )
        stack.callback(checkpoints.close)
        policy = learners["policy"]
        params = gather_to_host(policy.state.params, job.primary)

        def open_rollouts() -> Rollouts:
            assert pool is not None
            context = rollout.max_total_tokens
            engine = stack.enter_context(
                open_engine(source, params, engine_settings, config.engine_settings, context)
            )
            agent = EngineAgent(engine, source.tokenizer, train.seed)
            validation = dataclasses.replace(rollout, temperature=train.val_temperature)
            policies: dict[str, Agent] = {"val": agent, **baselines}
            rollouts = Rollouts(
                train=train,
                algorithm=config.algorithm,
                recipe=recipe,
                reward=reward,
                settings=rollout,
                mixture=mixture,
                engine=engine,
                agent=agent,
                pool=pool,
                evaluate=lambda name: evaluate_policy(policies[name], pool, eval_set, validation),
            )
            stack.callback(rollouts.close)
            return rollouts

        rollouts = job.on_primary(open_rollouts)
        yield Trainer(
            train=train,
            algorithm=config.algorithm,
            recipe=recipe,
            rollouts=rollouts,
            policy=policy,
            critic=learners.get("critic"),
            reference=reference,
            lr=policy_lr(config),
            job=job,
            directory=directory,
            checkpoints=checkpoints,
        )


def build_learners(
    config: TrainConfig, recipe: Recipe, source: PolicySource, mesh: jax.sharding.Mesh
) -> tuple[dict[str, Learner], Reference | None]:
    """The policy and, if the recipe needs them, the critic and the reference."""
    arch = source.card.architecture
    spec = policy_spec(config, recipe, arch, mesh)
    params = source.load(param_shardings(spec.shapes, mesh))
    require_finite(params, f"the model {config.model.path or 'of the warm start'}")
    reference = None
    if recipe.needs_reference:
        settings = config.algorithm
        reference = Reference(params, settings.reference == "host", settings.reference_dtype)
    learners = {}
    if recipe.needs_critic:
        value_spec = critic_spec(config, arch, mesh)
        placed = param_shardings(value_spec.shapes, mesh)
        critic = jax.jit(critic_from_policy, out_shardings=placed)(params)
        learners["critic"] = Learner(critic, value_spec, mesh)
    return {"policy": Learner(params, spec, mesh), **learners}, reference

"""Builds a trainer from settings: checks, creates and connects all parts of a run.

Settings are checked first, in order of cost: names, sizes, files, the mesh. The servers, the warm
start, the weights and the engine follow in that order. With several processes, all of them run this
code; servers, engine and everything else that rollouts need exist on process 0 only.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from manus_jax.agentgym.environments import check_items
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.table import environment
from manus_jax.algorithms.recipes import Recipe
from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import READS, SftConfig, TrainConfig
from manus_jax.config.run_config import config_text
from manus_jax.config.settings import (
    DataSettings,
    EnvSettings,
    LoraSettings,
    RolloutSettings,
    SftSettings,
    TrainSettings,
    WarmStartSettings,
)
from manus_jax.data.chat import CHATML
from manus_jax.data.chat_template import template_arguments
from manus_jax.data.mixture import Mixture
from manus_jax.data.tasks import Task, read_tasks, without
from manus_jax.engines.layout import split_devices
from manus_jax.evaluation.eval_sets import EvalSet, make_eval_set, playable_tasks, split_tasks
from manus_jax.evaluation.play import evaluate_policy
from manus_jax.files import write_atomically
from manus_jax.learner.mesh import check_batch, check_model, make_mesh
from manus_jax.models import loading
from manus_jax.models.attention import check_platform
from manus_jax.models.huggingface import ModelCard
from manus_jax.models.lora import make_lora
from manus_jax.models.transformer import make_compute
from manus_jax.rewards import RewardSettings
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.baseline_players import OraclePolicy, RandomPolicy
from manus_jax.rollout.build_rollout import (
    ENGINES,
    check_play,
    embedded_decoder,
    open_engine,
    open_servers,
)
from manus_jax.rollout.llm_player import ChatTokenizer, EngineAgent
from manus_jax.rollout.player import Agent
from manus_jax.rollout.recorded import RecordedError, read_recorded
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.strategies import episodes_per_spec, for_validation, plain_episodes
from manus_jax.rollout.traces import conversation_of
from manus_jax.rollout.trajectory import Trajectory, episode_specs, trajectories
from manus_jax.training import supervised
from manus_jax.training.checkpoints import Checkpoints
from manus_jax.training.export import describe_adapters, engine_weights
from manus_jax.training.failures import first_error
from manus_jax.training.job import Job
from manus_jax.training.learner_specs import (
    check_experts,
    check_lengths,
    check_memory,
    check_reference,
    make_recipe,
    policy_lr,
    replays_experts,
)
from manus_jax.training.metric_sinks import check_sinks
from manus_jax.training.policies import build_learners
from manus_jax.training.rollouts import Rollouts
from manus_jax.training.run_directory import RunDirectory
from manus_jax.training.trainer import Trainer
from manus_jax.vllm.open_pool import check_servers
from manus_jax.weights.host_tensors import types_of

_TRACES = "traces.jsonl"
_TRIED_TASKS = 1000  # of each source, with the reward function
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
        "warm_start.steps > 0 uses the oracle": _uses_oracle(config.warm_start),
    }
    for purpose, needed in needed_by.items():
        if needed:
            check_items(config.env.urls, config.env_pool, purpose)


def _uses_oracle(settings: WarmStartSettings) -> bool:
    return settings.steps > 0 and settings.random_share < 1


def _check_oracle(config: TrainConfig) -> None:
    """Raises ConfigError if the warm start needs an oracle that an environment does not have."""
    for env in config.env.names if _uses_oracle(config.warm_start) else ():
        try:
            OraclePolicy().check(env, config.rollout)
        except ValueError as error:
            raise ConfigError(
                f"warm_start.steps > 0: {error}; with warm_start.random_share = 1, a random policy "
                "plays all episodes"
            ) from None


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
    rollout = plain_episodes(config.rollout)
    random_episodes = run_episodes(specs[:random_tasks], policy, pool, rollout)
    # The oracle plays every task to its end, even if the turn limit of the agent is lower.
    unlimited = dataclasses.replace(rollout, max_turns=1000)
    demonstrations = []
    if random_tasks < len(specs):  # else there may be no oracle
        demonstrations = run_episodes(specs[random_tasks:], OraclePolicy(), pool, unlimited)
    kept = [t for t in trajectories(demonstrations) if t.success]
    if demonstrations and not kept:
        raise ConfigError(
            f"the oracle won none of {len(demonstrations)} training tasks. "
            + first_error(demonstrations)
        )
    kept += trajectories(random_episodes)
    if not kept:
        raise ConfigError(
            f"no episode of the warm start was played. {first_error(random_episodes)}"
        )
    write_atomically(traces, "".join(_trace(t, config.rollout.action_format) for t in kept))


def _trace(trajectory: Trajectory, format_name: str) -> str:
    assert trajectory.task.env is not None
    tools = format_for(environment(trajectory.task.env), format_name).tools
    conversation = conversation_of(trajectory, calls_tools=bool(tools))
    record = {"item_id": trajectory.task.item_id, "conversations": conversation}
    return json.dumps(record | ({"tools": tools} if tools else {})) + "\n"


def warm_start(
    config: TrainConfig, directory: RunDirectory, job: Job, devices: Sequence[Any] | None = None
) -> Path:
    """Fine-tunes on the traces, on the learner's devices; returns the path of the resulting model.

    With LoRA, a model from scratch is trained as a whole, and a given one with adapters, which are
    then merged with it: the run starts with new adapters.
    """
    settings = config.warm_start
    lora = LoraSettings()
    if config.model.path is not None and config.lora.rank is not None:
        lora = dataclasses.replace(config.lora, export_merged=True)
    export = job.count == 1  # with several processes, each reads its shards of the checkpoint
    sft = SftSettings(
        run_dir=str(directory.warm_start),
        total_steps=settings.steps,
        batch_size=settings.batch_size,
        seed=config.train.seed,
        save_freq=settings.steps,
        test_freq=settings.steps,
        loss_on=settings.loss_on,
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
        stage_tasks=0,
        val_files=(),
        overlong="cut",
    )
    fine_tuning = SftConfig(
        sft,
        data,
        config.model,
        config.scratch,
        optimizer,
        config.mesh,
        config.compute,
        chat=config.chat,
        lora=lora,
    )
    # A relative path, so that the run directory can be moved.
    written = dataclasses.replace(
        fine_tuning, data=dataclasses.replace(data, train_files=(_TRACES,))
    )
    supervised.run(fine_tuning, config_text(written, READS["sft"]), job, devices)
    if not export:
        return directory.warm_start
    name = f"{settings.steps}-merged" if lora.rank else str(settings.steps)
    return directory.warm_start / "export" / name


@contextlib.contextmanager
def open_trainer(config: TrainConfig, operative_config: str, job: Job) -> Iterator[Trainer]:
    """Opens a trainer; its servers and engine are closed at the end of the block."""
    train, data = config.train, config.data
    recipe = make_recipe(config.algorithm)
    check_sizes(config, recipe)
    check_reference(config)
    check_sinks(train)
    reward = RewardSettings(config.algorithm.reward, config.algorithm.reward_parameters)
    rollout = config.rollout
    check_play(config.env, rollout)
    _check_oracle(config)
    if config.model.path is not None:
        loading.require_path(Path(config.model.path))
    devices, engine_devices = split_devices(config.engine.devices)
    mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
    kernel = make_compute(**dataclasses.asdict(config.compute), mesh=mesh).kernel
    check_platform(kernel.implementation, mesh)
    check_batch(data.rows, data.max_length, mesh, kernel.implementation)
    job.on_primary(lambda: _check_items(config))
    sources, eval_set = read_task_sources(data, config.env, train.val_tasks)
    mixture = Mixture(sources, train.seed, data.stage_tasks)
    if config.algorithm.on_reward_error == "raise":
        for task in itertools.chain.from_iterable(tasks[:_TRIED_TASKS] for _, tasks, _ in sources):
            reward.try_task(task.item_id, task.ground_truth, env=task.env, extra=task.extra)
    baselines = _baselines(train, eval_set, rollout)
    if config.model.path is not None:
        source = loading.from_path(Path(config.model.path))
        arch = source.card.architecture
        chat_tokenizer = ChatTokenizer(source.tokenizer, config.chat)
        for env in config.env.names:
            chat_tokenizer.check(env, rollout)
    else:
        assert config.scratch is not None
        arch = loading.scratch_architecture(config.scratch)
        template_arguments(CHATML, config.chat)
        if any(format_for(environment(n), rollout.action_format).tools for n in config.env.names):
            raise ConfigError(
                f"rollout.action_format = {rollout.action_format!r} needs a model whose chat "
                "template shows tools; that of a model from scratch does not"
            )
    check_experts(config.model, arch, replays_experts(config))
    check_model(arch, mesh, kernel.implementation)
    lora = make_lora(config.lora, arch)
    recorded: list[Trajectory] = []
    if train.trajectories:
        if config.model.path is None:
            raise ConfigError("train.trajectories needs model.path: a model with their tokenizer")
        own = Path(train.run_dir).expanduser().resolve()
        for listed in train.trajectories:
            if Path(listed).expanduser().resolve().is_relative_to(own):
                raise RecordedError(
                    f"train.trajectories: {listed} is in train.run_dir, where this run writes its "
                    "own; choose another run_dir"
                )
        paths, vocabulary = train.trajectories, source.tokenizer.get_vocab()
        read = lambda: read_recorded(paths, data.max_length, arch.vocab_size, vocabulary)
        recorded = job.on_primary(read) or []
    held = 0
    engine_settings = dataclasses.replace(
        config.engine, tensor=config.engine.tensor or mesh.shape["tensor"]
    )
    if ENGINES[config.engine.name].engine.on_learner_device:
        layout = embedded_decoder(
            engine_settings, arch, rollout.max_total_tokens, mesh, engine_devices
        ).layout
        held = 0 if engine_devices else layout.device_bytes * layout.mesh.size
    frozen_itemsize = 0 if lora is None else 2 if config.compute.dtype == "bfloat16" else 4
    check_memory(arch, data, mesh, held, frozen_itemsize)
    served = None if config.model.path is None else arch  # a tokenizer may still change it
    own, length = config.engine_settings, rollout.max_total_tokens
    send_adapters = lora is not None and ENGINES[config.engine.name].takes_adapters(own)
    rank = config.lora.rank if send_adapters else None
    base = None if rank is None or config.warm_start.steps else config.model.path
    job.on_primary(
        lambda: check_servers(own, length, served, rank, None if base is None else Path(base))
    )
    opened = job.on_primary(lambda: RunDirectory(train.run_dir, operative_config))
    directory = opened or RunDirectory(train.run_dir, "")

    with contextlib.ExitStack() as stack:
        pool = job.on_primary(
            lambda: stack.enter_context(open_servers(config.env, config.env_pool))
        )
        path = config.model.path
        if config.warm_start.steps:
            job.on_primary(lambda: play_traces(config, directory, sources, pool))
            path = str(warm_start(config, directory, job, devices))
        assert path is not None
        loaded = loading.from_path(Path(path))
        source = job.on_primary(lambda: loaded.keep_card(directory.model)) or loaded
        learners, reference = build_learners(config, recipe, source, mesh)
        adaptation = describe_adapters(learners["policy"], Path(path), directory)
        checkpoints = Checkpoints(
            directory.checkpoints,
            keep=train.keep_checkpoints,
            parts=tuple(learners),
            best=True,
            strict=train.strict_resume,
            job=job,
            adaptation=adaptation,
        )
        stack.callback(checkpoints.close)
        policy = learners["policy"]
        sent = adaptation if send_adapters else None
        embedded = ENGINES[config.engine.name].engine.on_learner_device
        # Published weights have the types of the model's own tensors.
        types = types_of(ModelCard.load(directory.model), config.engine.dtype if embedded else None)
        weights = functools.partial(engine_weights, policy, sent, directory, job, types)
        params = weights()

        def open_rollouts() -> Rollouts:
            assert pool is not None
            context = rollout.max_total_tokens
            engine = stack.enter_context(
                open_engine(source, params, engine_settings, config.engine_settings, context)
            )
            agent = EngineAgent(engine, source.tokenizer, train.seed, config.chat)
            stack.callback(agent.close)
            with_policy = dataclasses.replace(rollout, temperature=train.val_temperature)
            validation = {name: plain_episodes(with_policy) for name in baselines}
            validation["val"] = for_validation(with_policy)
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
                evaluate=lambda name, stop: evaluate_policy(
                    policies[name], pool, eval_set, validation[name], stop=stop
                ),
                recorded=recorded,
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
            engine_weights=weights,
            adaptation=adaptation,
            export_merged=config.lora.export_merged,
        )

"""The warm start: a model learns by imitation before reinforcement learning.

The oracle and a random policy play training tasks; supervised fine-tuning on these episodes makes
the model that the run starts with.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.table import environment
from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import READS, SftConfig, TrainConfig
from manus_jax.config.run_config import config_text
from manus_jax.config.settings import LoraSettings, SftSettings, WarmStartSettings
from manus_jax.data.mixture import Mixture, Sources
from manus_jax.files import (
    CHECKSUMS,
    DamagedError,
    remove_directory,
    verify_checksums,
    write_atomically,
)
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.baseline_players import OraclePolicy, RandomPolicy
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.strategies import plain_episodes
from manus_jax.rollout.traces import conversation_of
from manus_jax.rollout.trajectory import Trajectory, episode_specs, trajectories
from manus_jax.training import supervised
from manus_jax.training.failures import first_error
from manus_jax.training.job import Job
from manus_jax.training.run_directory import RunDirectory

_TRACES = "traces.jsonl"


def uses_oracle(settings: WarmStartSettings) -> bool:
    """Whether the oracle plays some of the episodes."""
    return settings.steps > 0 and settings.random_share < 1


def check_oracle(config: TrainConfig) -> None:
    """Raises ConfigError if the warm start needs an oracle that an environment does not have."""
    for env in config.env.names if uses_oracle(config.warm_start) else ():
        try:
            OraclePolicy().check(env, config.rollout)
        except ValueError as error:
            raise ConfigError(
                f"warm_start.steps > 0: {error}; with warm_start.random_share = 1, a random policy "
                "plays all episodes"
            ) from None


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
        demonstrations = run_episodes(
            specs[random_tasks:], OraclePolicy(), pool, unlimited, caller_raises=True
        )
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
    return _exported(config, directory) if export else directory.warm_start


def finished_warm_start(config: TrainConfig, directory: RunDirectory, job: Job) -> Path | None:
    """The model of a warm start that has ended; None if `warm_start` has to make it.

    A damaged one is removed, because `warm_start` makes it again from its checkpoint.
    """
    model = _exported(config, directory)
    if job.count > 1 or not (model / CHECKSUMS).is_file():
        return None
    try:
        verify_checksums(model)
        return model
    except DamagedError as error:
        print(f"{error}; the warm start's model is made again from its checkpoint", flush=True)
        remove_directory(model, CHECKSUMS)
        return None


def _exported(config: TrainConfig, directory: RunDirectory) -> Path:
    steps = config.warm_start.steps
    adapted = config.model.path is not None and config.lora.rank is not None
    return directory.warm_start / "export" / (f"{steps}-merged" if adapted else str(steps))

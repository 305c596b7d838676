"""Builds a trainer from settings that have been checked: creates and connects the parts of a run.

The servers, the warm start, the weights and the engine follow each other in this order. With
several processes, all of them run this code; servers, engine and everything else that rollouts need
exist on process 0 only.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.commands import TrainConfig
from manus_jax.evaluation.play import evaluate_policy
from manus_jax.learner.learner import Learner
from manus_jax.models import loading
from manus_jax.models.adapter_files import Adaptation
from manus_jax.models.huggingface import ModelCard
from manus_jax.models.loading import PolicySource
from manus_jax.rollout.build_rollout import ENGINES, open_engine, open_servers
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.player import Agent
from manus_jax.rollout.strategies import for_validation, plain_episodes
from manus_jax.training.checkpoints import Checkpoints
from manus_jax.training.export import describe_adapters, engine_weights
from manus_jax.training.job import Job
from manus_jax.training.learner_specs import policy_lr
from manus_jax.training.policies import build_learners
from manus_jax.training.rollouts import Rollouts
from manus_jax.training.run_checks import CheckedRun, check_run
from manus_jax.training.run_directory import RunDirectory
from manus_jax.training.trainer import Trainer
from manus_jax.training.warm_start import finished_warm_start, play_traces, warm_start
from manus_jax.weights.host_tensors import types_of


@contextlib.contextmanager
def open_trainer(config: TrainConfig, operative_config: str, job: Job) -> Iterator[Trainer]:
    """Opens a trainer; its servers and engine are closed at the end of the block."""
    checked = check_run(config, job)
    run_dir = config.train.run_dir
    opened = job.on_primary(lambda: RunDirectory(run_dir, operative_config))
    directory = opened or RunDirectory(run_dir, "")
    with contextlib.ExitStack() as stack:
        pool = job.on_primary(
            lambda: stack.enter_context(open_servers(config.env, config.env_pool))
        )
        path = _initial_model(config, checked, directory, job, pool)
        loaded = loading.from_path(path)
        source = job.on_primary(lambda: loaded.keep_card(directory.model)) or loaded
        learners, reference = build_learners(config, checked.recipe, source, checked.mesh)
        policy = learners["policy"]
        adaptation = describe_adapters(policy, path, directory)
        checkpoints = Checkpoints(
            directory.checkpoints,
            keep=config.train.keep_checkpoints,
            parts=tuple(learners),
            best=True,
            strict=config.train.strict_resume,
            job=job,
            adaptation=adaptation,
        )
        stack.callback(checkpoints.close)
        sent = adaptation if checked.send_adapters else None
        weights = _weights_function(config, policy, sent, directory, job)
        params = weights()

        def start_rollouts() -> Rollouts:
            assert pool is not None
            return stack.enter_context(_open_rollouts(config, checked, source, params, pool))

        rollouts = job.on_primary(start_rollouts)
        yield Trainer(
            train=config.train,
            algorithm=config.algorithm,
            recipe=checked.recipe,
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


def _initial_model(
    config: TrainConfig,
    checked: CheckedRun,
    directory: RunDirectory,
    job: Job,
    pool: EnvironmentPool | None,
) -> Path:
    """The model that the run starts with: the given one, or that of the warm start."""
    if config.warm_start.steps:
        if model := finished_warm_start(config, directory, job):
            return model
        job.on_primary(lambda: play_traces(config, directory, checked.sources, pool))
        return warm_start(config, directory, job, checked.devices)
    assert config.model.path is not None
    return Path(config.model.path)


def _weights_function(
    config: TrainConfig,
    policy: Learner,
    adaptation: Adaptation | None,
    directory: RunDirectory,
    job: Job,
) -> Callable[[], Any]:
    """The function that returns the policy's current weights for the engine."""
    embedded = ENGINES[config.engine.name].engine.on_learner_device
    # Published weights have the types of the model's own tensors.
    types = types_of(ModelCard.load(directory.model), config.engine.dtype if embedded else None)
    return functools.partial(engine_weights, policy, adaptation, directory, job, types)


@contextlib.contextmanager
def _open_rollouts(
    config: TrainConfig,
    checked: CheckedRun,
    source: PolicySource,
    params: Any,
    pool: EnvironmentPool,
) -> Iterator[Rollouts]:
    """Opens the engine with the given weights, and the rollouts that use it."""
    train, length = config.train, config.rollout.max_total_tokens
    rollout = dataclasses.replace(config.rollout, temperature=train.val_temperature)
    validation = {name: plain_episodes(rollout) for name in checked.baselines}
    validation["val"] = for_validation(rollout)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(
            open_engine(source, params, checked.engine, config.engine_settings, length)
        )
        agent = EngineAgent(engine, source.tokenizer, train.seed, config.chat)
        stack.callback(agent.close)
        policies: dict[str, Agent] = {"val": agent, **checked.baselines}
        rollouts = Rollouts(
            train=train,
            algorithm=config.algorithm,
            recipe=checked.recipe,
            reward=checked.reward,
            settings=config.rollout,
            mixture=checked.mixture,
            engine=engine,
            agent=agent,
            pool=pool,
            evaluate=lambda name, stop: evaluate_policy(
                policies[name], pool, checked.eval_set, validation[name], stop=stop
            ),
            recorded=checked.recorded,
        )
        stack.callback(rollouts.close)
        yield rollouts

"""Settings into a trainer: every part of a run built, checked and connected, in order of cost.

What can be wrong is found first: names, sizes, files, the mesh. Then come the servers, the warm
start, the weights, and last the engine. Of several processes the first builds all of this; what the
others build with it (`following`) is in functions of its own.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from envs.traces import conversation_of
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.algorithms.recipes import Recipe
from manus_jax.config.binding import ConfigError
from manus_jax.config.settings import (
    DataSettings,
    EnvSettings,
    SftSettings,
    TrainSettings,
)
from manus_jax.data.tasks import Mixture, Task, read_tasks, without
from manus_jax.evaluation.eval_sets import Panel, listed_tasks, make_panel, split_tasks
from manus_jax.evaluation.play import evaluate_policy
from manus_jax.learner.learner import Learner, Reference, Together
from manus_jax.learner.mesh import check_batch, make_mesh, param_shardings
from manus_jax.models import loading as policy_source
from manus_jax.models.loading import PolicySource
from manus_jax.models.transformer import Params, critic_from_policy
from manus_jax.rewards import RewardSettings
from manus_jax.rollout.baseline_players import OraclePolicy, RandomPolicy
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.player import Agent
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.settings import RolloutSettings
from manus_jax.rollout.trajectory import episode_specs, trajectories
from manus_jax.training import supervised
from manus_jax.training.build_rollout import (
    check_play,
    engine_kind,
    make_rollout,
    open_engine,
    open_servers,
)
from manus_jax.training.checkpoints import Checkpoints
from manus_jax.training.distributed import Preemption, Team, alone, dismissed_at_the_end
from manus_jax.training.learner_specs import (
    TrainConfig,
    design_critic,
    design_policy,
    make_recipe,
    policy_lr,
)
from manus_jax.training.metric_sinks import check_sinks
from manus_jax.training.run_directory import RunDirectory, write_atomically
from manus_jax.training.stopping import Preempted
from manus_jax.training.trainer import Trainer
from manus_jax.weights.host_tensors import spread

_TRACES = "traces.jsonl"
Sources = list[tuple[str, list[Task], float]]


def read_task_sources(
    data: DataSettings, env: EnvSettings, val_tasks: int
) -> tuple[Sources, Panel]:
    """Weighted sources of training tasks, and the fixed panel of held-out ones."""
    panel = make_panel(env, val_tasks, data.val_files)
    if not data.train_files:
        every = 10**9
        sources = [(name, split_tasks(name, "train", every), 1.0) for name in env.names]
        return sources, panel
    held_out = read_tasks(data.val_files) if data.val_files else []
    sources = []
    for index, path in enumerate(data.train_files):
        tasks = without(listed_tasks([path], env.names), held_out)
        weight = data.train_weights[index] if data.train_weights else float(max(1, len(tasks)))
        sources.append((f"{index}:{Path(path).name}", tasks, weight))
    return sources, panel


def _check_sizes(config: TrainConfig, recipe: Recipe) -> None:
    if config.rollout.max_total_tokens > config.data.max_length:
        raise ConfigError(
            f"rollout.max_total_tokens = {config.rollout.max_total_tokens} is more than "
            f"data.max_length = {config.data.max_length}, the tokens that a row of a batch holds"
        )
    if recipe.needs_groups and config.train.group_size < 2:
        raise ConfigError(
            f"recipe {recipe.name} compares episodes of one task with each other: "
            "train.group_size must be at least 2"
        )
    if config.model.path is None and config.warm_start.steps == 0:
        raise ConfigError(
            "model.path is not set, and a model from scratch has nothing to say: set "
            "warm_start.steps to fine-tune it on oracle episodes first"
        )


def _yardsticks(train: TrainSettings, panel: Panel, rollout: RolloutSettings) -> dict[str, Agent]:
    made: dict[str, Agent] = {"oracle": OraclePolicy(), "random": RandomPolicy(train.seed)}
    for name in train.yardsticks:
        if name not in made:
            raise ConfigError(f"train.yardsticks has {name!r}; there are oracle and random")
        for env in panel.environments:
            try:
                made[name].check(env, rollout)
            except ValueError as error:
                raise ConfigError(f"train.yardsticks: {error}") from None
    return made


def play_traces(
    config: TrainConfig, directory: RunDirectory, sources: Sources, pool: EnvironmentPool
) -> None:
    """Episodes of the training tasks to fine-tune on, as conversations in a file.

    The oracle and chance play through the same prompts and formats that the model will meet.
    """
    settings = config.warm_start
    traces = directory.warm_start / _TRACES
    if traces.exists():
        return
    traces.parent.mkdir(exist_ok=True)
    tasks = Mixture(sources, config.train.seed).next_batch(settings.traces)
    rollout = make_rollout(config.rollout, config.train.seed)
    by_chance = round(settings.random_share * len(tasks))
    specs = episode_specs(tasks)
    played = run_episodes(specs[:by_chance], RandomPolicy(config.train.seed), pool, rollout)
    # The oracle shows the whole way, also where the agent may only go a part of it.
    patient = dataclasses.replace(rollout, max_turns=1000)
    shown = run_episodes(specs[by_chance:], OraclePolicy(), pool, patient)
    won = [t for t in trajectories(shown) if t.success]
    if not won:
        raise ConfigError(f"the oracle won none of {len(shown)} training tasks")
    won += trajectories(played)
    lines = (
        json.dumps({"item_id": t.task.item_id, "conversations": conversation_of(t)}) + "\n"
        for t in won
    )
    write_atomically(traces, "".join(lines))


def warm_start(config: TrainConfig, directory: RunDirectory) -> Path:
    """Fine-tunes on the traces, all processes together; where the model is that comes of it."""
    settings = config.warm_start
    alone = jax.process_count() == 1
    sft = SftSettings(
        run_dir=str(directory.warm_start),
        total_steps=settings.steps,
        batch_size=settings.batch_size,
        seed=config.train.seed,
        save_freq=settings.steps,
        test_freq=settings.steps,
        export=alone,  # of many, each reads its own shards of the checkpoint
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
    supervised.run(
        supervised.SftConfig(
            sft, data, config.model, config.scratch, optimizer, config.mesh, config.compute
        ),
        repr((sft, data, config.model, config.scratch, optimizer)),
    )
    return directory.warm_start / "export" / str(settings.steps) if alone else directory.warm_start


@contextlib.contextmanager
def open_trainer(
    config: TrainConfig, operative_config: str, team: Team | None = None
) -> Iterator[Trainer]:
    """A trainer whose servers and engine live as long as the block.

    A `team` is of several processes, this being the first; its end is theirs.
    """
    together = alone if team is None else team.together
    train, data = config.train, config.data
    recipe = make_recipe(config.algorithm)
    _check_sizes(config, recipe)
    check_sinks(train)
    reward = RewardSettings(config.algorithm.reward, config.algorithm.reward_parameters)
    rollout = make_rollout(config.rollout, train.seed)
    check_play(config.env, rollout)
    kind = engine_kind(config.engine.name)
    mesh = make_mesh(**dataclasses.asdict(config.mesh))
    kernel = supervised.make_compute(config.compute, mesh).kernel
    check_batch(data.rows, data.max_length, mesh, kernel.implementation)
    sources, panel = read_task_sources(data, config.env, train.val_tasks)
    mixture = Mixture(sources, train.seed)
    yardsticks = _yardsticks(train, panel, rollout)
    if config.model.path is not None:
        policy_source.from_path(Path(config.model.path))
    directory = RunDirectory(train.run_dir, operative_config)

    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(open_servers(config.env, config.env_pool))
        path = config.model.path
        if config.warm_start.steps:
            play_traces(config, directory, sources, pool)
            if team is not None:
                _make_tokenizer(config, directory)
            with together(do="warm_start", times=config.warm_start.steps + 1):
                path = str(warm_start(config, directory))
        assert path is not None
        source = policy_source.from_path(Path(path)).keep_card(directory.model)
        with together(do="build", model=path):
            learners, reference = build_learners(config, recipe, source, mesh, together)
            checkpoints = open_checkpoints(config, directory, learners)
        stack.callback(checkpoints.close)
        policy = learners["policy"]
        weights = _weights_for(kind.engine.accepts_streamed_tensors, policy, team)
        engine = stack.enter_context(
            open_engine(
                source,
                weights(),
                config.engine,
                config.engine_settings,
                rollout.max_total_tokens,
            )
        )
        agent = EngineAgent(engine, source.tokenizer)
        validation = make_rollout(config.rollout, train.seed, train.val_temperature)
        policies: dict[str, Agent] = {"val": agent, **yardsticks}
        with dismissed_at_the_end(together):
            yield Trainer(
                train=train,
                algorithm=config.algorithm,
                recipe=recipe,
                reward=reward,
                rollout=rollout,
                mixture=mixture,
                policy=policy,
                critic=learners.get("critic"),
                reference=reference,
                engine=engine,
                agent=agent,
                pool=pool,
                directory=directory,
                checkpoints=checkpoints,
                evaluate=lambda name: evaluate_policy(policies[name], pool, panel, validation),
                lr=policy_lr(config),
                weights=weights,
                together=together,
                preempted=None if team is None else _preempted_anywhere(team, checkpoints),
            )


def _make_tokenizer(config: TrainConfig, directory: RunDirectory) -> None:
    """Of a model from scratch, before anybody asks for it."""
    if config.scratch is not None:
        conversations = read_tasks(directory.warm_start / _TRACES, needs="conversation")
        texts = (m.content for task in conversations for m in task.messages)
        model = directory.warm_start / "model"
        policy_source.from_scratch(config.scratch, texts, config.train.seed, model)


def _weights_for(streamed: bool, policy: Learner, team: Team | None) -> Callable[[], Params]:
    """The policy's weights of the moment, as an engine takes them.

    Weights on several processes are gathered one tensor at a time if the engine accepts streamed
    tensors, and all at once otherwise.
    """
    if team is None:
        return lambda: policy.state.params
    tensors = lambda: spread(policy.state.params, team.together)
    if streamed:
        return tensors
    return lambda: jax.tree.map(np.asarray, tensors())


def _preempted_anywhere(team: Team, checkpoints: Checkpoints) -> Preempted:
    preemption = Preemption(checkpoints.preempted)

    def preempted(step: int) -> bool:
        with team.together(do="preempted", step=step):
            return preemption(step)

    return preempted


def build_learners(
    config: TrainConfig,
    recipe: Recipe,
    source: PolicySource,
    mesh: jax.sharding.Mesh,
    together: Together,
) -> tuple[dict[str, Learner], Reference | None]:
    """The policy, its critic and its reference, as the recipe needs them."""
    arch = source.card.architecture
    policy_design = design_policy(config, recipe, arch, mesh)
    params = source.load(param_shardings(policy_design.shapes, mesh))
    reference = None
    if recipe.needs_reference:
        reference = Reference(params, config.algorithm.reference == "host")
    learners = {}
    if recipe.needs_critic:
        design = design_critic(config, arch, mesh)
        placed = param_shardings(design.shapes, mesh)
        critic = jax.jit(critic_from_policy, out_shardings=placed)(params)
        learners["critic"] = Learner(critic, design, mesh, "critic", together)
    return {
        "policy": Learner(params, policy_design, mesh, "policy", together),
        **learners,
    }, reference


def open_checkpoints(
    config: TrainConfig, directory: RunDirectory, learners: Mapping[str, Learner]
) -> Checkpoints:
    return Checkpoints(
        directory.checkpoints, keep=config.train.keep_checkpoints, parts=tuple(learners), best=True
    )

"""What a run's settings make of the learner, before any weight is there: the same for all who ask.

The trainer builds its policy and critic from these designs, and whoever wants to know what training
would compile (its memory, its collectives) gets the very same ones.
"""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from manus_jax.algorithms.corrections import CORRECTIONS
from manus_jax.algorithms.recipes import RECIPES, Recipe, policy_loss
from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import TrainConfig
from manus_jax.config.settings import AlgorithmSettings, OptimizerSettings
from manus_jax.learner import objectives
from manus_jax.learner.learner import Design
from manus_jax.learner.mesh import check_batch, check_model
from manus_jax.learner.optimizer import adamw, learning_rate
from manus_jax.learner.packing import Layout
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Compute, Critic, Transformer, abstract_model
from manus_jax.rollout.batch import sample_fields
from manus_jax.training.supervised import make_compute


def make_recipe(settings: AlgorithmSettings) -> Recipe:
    """The named recipe with the settings that were given."""
    try:
        in_recipe = {field.name for field in dataclasses.fields(Recipe)}
        given = {k: v for k, v in vars(settings).items() if k in in_recipe and v is not None}
        if settings.corrections is not None:
            given["corrections"] = tuple(CORRECTIONS[name] for name in settings.corrections)
        recipe = dataclasses.replace(RECIPES[settings.recipe], **given)
    except ValueError as error:
        raise ConfigError(f"algorithm: {error}") from None
    if unknown := [name for name in recipe.extra_fields if name not in sample_fields()]:
        raise ConfigError(
            f"algorithm.recipe: the policy loss {recipe.loss!r} needs the field {unknown[0]!r}; "
            f"samples have {', '.join(sample_fields())}"
        )
    if recipe.aggregation == "seq-mean-token-sum-norm" and not settings.norm_constant:
        raise ConfigError(
            f"algorithm.norm_constant is not set, and {recipe.name} divides each sequence's loss "
            "by it: the most tokens an agent may say in an episode, for instance"
        )
    return recipe


def policy_lr(config: TrainConfig) -> Any:
    """The policy's schedule: update -> learning rate."""
    opt = config.optimizer
    return learning_rate(
        opt.lr, opt.schedule, opt.warmup_steps, config.train.total_steps, opt.min_lr_ratio
    )


def design_policy(config: TrainConfig, recipe: Recipe, arch: Architecture, mesh: Mesh) -> Design:
    """The policy in training: the recipe's loss at the temperature that episodes are sampled at."""
    graphdef, shapes = abstract_model(Transformer, arch, _compute(config, arch, mesh))
    temperature = config.rollout.temperature or 1.0
    return Design(
        shapes,
        objectives.policy(
            graphdef, policy_loss(recipe), temperature, with_entropy="entropy" in recipe.loss_fields
        ),
        lambda p, batch: objectives.log_probs_of(graphdef, p, batch, temperature)[0],
        adamw(policy_lr(config), *_adam(config.optimizer)),
        _layout(config),
    )


def design_critic(config: TrainConfig, arch: Architecture, mesh: Mesh) -> Design:
    """The critic in training."""
    graphdef, shapes = abstract_model(Critic, arch, _compute(config, arch, mesh))
    lr = learning_rate(config.algorithm.critic_lr, "constant", 0, 1, 0.0)
    return Design(
        shapes,
        objectives.critic(graphdef, config.algorithm.cliprange_value),
        lambda p, batch: objectives.values_of(graphdef, p, batch),
        adamw(lr, *_adam(config.optimizer)),
        _layout(config),
    )


def _compute(config: TrainConfig, arch: Architecture, mesh: Mesh) -> Compute:
    """How the model is computed, once it and its rows are known to divide over the mesh."""
    compute = make_compute(config.compute, mesh)
    implementation = compute.kernel.implementation
    check_model(arch, mesh, implementation)
    check_batch(config.data.rows, config.data.max_length, mesh, implementation)
    return compute


def _adam(opt: OptimizerSettings) -> tuple[float, float, float, float, float]:
    return opt.weight_decay, opt.b1, opt.b2, opt.eps, opt.grad_clip


def _layout(config: TrainConfig) -> Layout:
    train, rollout = config.train, config.rollout
    segments = 1 if rollout.memory_turns is None else rollout.max_turns
    sequences = train.batch_size * train.group_size * segments
    return Layout.for_batch(sequences, config.data.rows, config.data.max_length)

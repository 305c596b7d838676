"""What a run's settings make of the learner, before any weight is there: the same for all who ask.

The trainer builds its policy and critic from these designs, and whoever wants to know what training
would compile (its memory, its collectives) gets the very same ones.
"""

import dataclasses
import typing
from typing import Any

from jax.sharding import Mesh

from manus_jax.algorithms.corrections import get_correction
from manus_jax.algorithms.recipes import Recipe, get_recipe, policy_loss
from manus_jax.config.binding import ConfigError, build, parse, refuse_unread
from manus_jax.config.settings import (
    AlgorithmSettings,
    ComputeSettings,
    DataSettings,
    DistributedSettings,
    EngineSettings,
    EnvPoolSettings,
    EnvSettings,
    MeshSettings,
    ModelSettings,
    OptimizerSettings,
    RolloutGroup,
    ScratchSettings,
    TrainSettings,
    WarmStartSettings,
)
from manus_jax.learner import objectives
from manus_jax.learner.learner import Design
from manus_jax.learner.mesh import check_batch, check_model
from manus_jax.learner.optimizer import adamw, learning_rate
from manus_jax.learner.packing import Layout
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Compute, Critic, Transformer, abstract_model
from manus_jax.rollout.batch import sample_fields
from manus_jax.training.build_rollout import engine_kind
from manus_jax.training.supervised import make_compute

_RECIPE_FIELDS = (
    "gamma",
    "lam",
    "normalize_by_std",
    "step_weight",
    "clip_low",
    "clip_high",
    "dual_clip",
    "entropy_coef",
    "aggregation",
    "kl_placement",
    "kl_coef",
    "kl_estimator",
    "dynamic_sampling",
)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    train: TrainSettings
    algorithm: AlgorithmSettings
    env: EnvSettings
    rollout: RolloutGroup
    engine: EngineSettings
    data: DataSettings
    model: ModelSettings
    scratch: ScratchSettings | None  # when model.path is None
    warm_start: WarmStartSettings
    optimizer: OptimizerSettings
    mesh: MeshSettings
    compute: ComputeSettings
    env_pool: EnvPoolSettings = dataclasses.field(default_factory=EnvPoolSettings)
    engine_settings: Any = None  # the chosen engine's own group, e.g. VllmSettings


def read_config(files: list[str], params: list[str]) -> tuple[TrainConfig, DistributedSettings]:
    """A run's settings from gin files and bindings; a binding that nobody reads is an error."""
    parse(files, params)
    hints = typing.get_type_hints(TrainConfig)
    groups = {name: cls for name, cls in hints.items() if hasattr(cls, "gin_name")}
    read: list[type] = [*groups.values(), DistributedSettings]
    *settings, distributed = build(*read)
    built = dict(zip(groups, settings, strict=True))
    built["scratch"] = None
    if built["model"].path is None:
        read.append(ScratchSettings)
        (built["scratch"],) = build(ScratchSettings)
    if (own := engine_kind(built["engine"].name).settings) is not None:
        read.append(own)
        (built["engine_settings"],) = build(own)
    refuse_unread(read)
    return TrainConfig(**built), distributed


def make_recipe(settings: AlgorithmSettings) -> Recipe:
    """The named recipe with the settings that were given."""
    try:
        named = {field: getattr(settings, field) for field in _RECIPE_FIELDS}
        given = {field: value for field, value in named.items() if value is not None}
        recipe = dataclasses.replace(get_recipe(settings.recipe), **given)
        if settings.corrections is not None:
            corrections = tuple(get_correction(name) for name in settings.corrections)
            recipe = dataclasses.replace(recipe, corrections=corrections)
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

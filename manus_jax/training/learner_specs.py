"""Builds the learner specifications of a run from its settings, without weights.

Training creates the policy and critic from them; planning compiles them for other hardware.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from manus_jax.algorithms.corrections import CORRECTIONS
from manus_jax.algorithms.recipes import RECIPES, Recipe, policy_loss
from manus_jax.algorithms.reward_allocation import ALLOCATIONS
from manus_jax.config.binding import ConfigError, changed
from manus_jax.config.commands import TrainConfig
from manus_jax.config.settings import (
    AlgorithmSettings,
    ComputeSettings,
    DataSettings,
    MeshSettings,
    ModelSettings,
)
from manus_jax.learner import objectives
from manus_jax.learner.learner import LearnerSpec
from manus_jax.learner.mesh import check_batch, check_model, make_mesh
from manus_jax.learner.optimizer import learning_rate, make_optimizer
from manus_jax.learner.packing import RowShape
from manus_jax.learner.update import Frozen
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import check_platform
from manus_jax.models.lora import Lora, make_lora, split
from manus_jax.models.transformer import (
    Compute,
    Critic,
    Params,
    Transformer,
    abstract_model,
    make_compute,
)
from manus_jax.rollout.batch import token_columns
from manus_jax.rollout.build_rollout import ENGINES
from manus_jax.rollout.strategies import episodes_per_spec


def make_recipe(settings: AlgorithmSettings) -> Recipe:
    """The named recipe; settings that are set replace its defaults."""
    try:
        in_recipe = {field.name for field in dataclasses.fields(Recipe)}
        given = {k: v for k, v in vars(settings).items() if k in in_recipe and v is not None}
        if settings.corrections is not None:
            given["corrections"] = tuple(CORRECTIONS[name] for name in settings.corrections)
        recipe = dataclasses.replace(RECIPES[settings.recipe], **given)
        ALLOCATIONS[settings.reward_allocation]  # RegistryError for unknown names
    except ValueError as error:
        raise ConfigError(f"algorithm: {error}") from None
    if unknown := [name for name in recipe.extra_fields if name not in token_columns()]:
        raise ConfigError(
            f"algorithm.recipe: the policy loss {recipe.loss!r} needs the column {unknown[0]!r}; "
            f"batches have {', '.join(token_columns())}"
        )
    if settings.kl_controller == "adaptive" and recipe.kl_placement != "reward":
        raise ConfigError(
            "algorithm.kl_controller = 'adaptive' changes the KL in the reward: it needs "
            "algorithm.kl_placement = 'reward'"
        )
    if recipe.needs_preferences and settings.old_log_probs == "bypass":
        raise ConfigError(
            f"algorithm.old_log_probs = 'bypass' takes the sampler's log-probs, and {recipe.name} "
            "compares those of the policy with the reference: use 'recompute'"
        )
    if recipe.aggregation == "seq-mean-token-sum-norm" and not settings.norm_constant:
        raise ConfigError(
            f"algorithm.norm_constant is not set, and {recipe.name} divides each sequence's loss "
            "by it: the most tokens an agent may say in an episode, for instance"
        )
    _refuse_unread(settings, recipe)
    return recipe


def _refuse_unread(settings: AlgorithmSettings, recipe: Recipe) -> None:
    """Raises ConfigError if a setting differs from its default and the recipe does not read it."""
    needed = {
        "has no critic": (recipe.needs_critic, ("critic_warmup", "critic_lr", "cliprange_value")),
        "has no advantages per turn": (recipe.needs_step_groups, ("similarity", "step_weight")),
        "compares no pairs of episodes": (recipe.needs_preferences, ("beta",)),
        "does not sample dynamically": (recipe.dynamic_sampling, ("max_gen_batches",)),
        f"aggregates by {recipe.aggregation}": (
            recipe.aggregation == "seq-mean-token-sum-norm",
            ("norm_constant",),
        ),
    }
    for reason, (read, names) in needed.items():
        for name in () if read else changed(settings, *names):
            raise ConfigError(
                f"algorithm.{name} = {getattr(settings, name)} is not read: recipe {recipe.name} "
                f"{reason}"
            )


def open_mesh(
    mesh: MeshSettings,
    compute: ComputeSettings,
    data: DataSettings,
    devices: Sequence[Any] | None = None,
) -> tuple[Mesh, Compute]:
    """A run's mesh (`devices` None: over all of them), and how the model is computed on it.

    Raises if the devices cannot run the attention kernel, or rows do not divide over the mesh.
    """
    made = make_mesh(**dataclasses.asdict(mesh), devices=devices)
    computed = make_compute(**dataclasses.asdict(compute), mesh=made)
    check_platform(computed.kernel.implementation, made)
    check_batch(data.rows, data.max_length, made, computed.kernel.implementation)
    return made, computed


def check_lengths(config: TrainConfig) -> None:
    """Raises ConfigError if an episode may be longer than a row."""
    if config.rollout.max_total_tokens > config.data.max_length:
        raise ConfigError(
            f"rollout.max_total_tokens = {config.rollout.max_total_tokens} is more than "
            f"data.max_length = {config.data.max_length}, the tokens that a row of a batch holds: "
            f"set data.max_length = {-(-config.rollout.max_total_tokens // 128) * 128}, or use a "
            "file of configs/hardware/, which sets it"
        )


def check_memory(
    arch: Architecture,
    data: DataSettings,
    mesh: Mesh,
    engine_bytes: float = 0.0,
    frozen_itemsize: int = 0,
) -> None:
    """Raises ConfigError if a model needs more memory than the devices have, whatever its batch.

    Counts what an update needs at least: on CPU devices, which share the machine's memory,
    parameters, gradients, two moments, one activation of each token, and the embedded engine; on an
    accelerator its parts of the parameters and gradients in float32. With LoRA, it is the base,
    whose numbers have `frozen_itemsize` bytes. `plan` says what is needed.
    """
    limit = device_memory(mesh.devices.flat[0])
    if limit is not None:
        _check_device_memory(arch, mesh, limit, frozen_itemsize)
        return
    if mesh.devices.flat[0].platform != "cpu":
        return
    needed = (frozen_itemsize or 16.0) * arch.num_params
    needed += 4.0 * data.rows * data.max_length * arch.hidden_size
    needed += engine_bytes
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise ConfigError(
            f"the run needs at least {needed / 2**30:.1f} GiB of memory, and this machine has "
            f"{available / 2**30:.1f} GiB: use a smaller model, or lower data.rows, "
            "data.max_length, engine.slots or rollout.max_total_tokens"
        )


def device_memory(device: Any) -> int | None:
    """The bytes that JAX may allocate on an accelerator; None if the device does not tell."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def _check_device_memory(arch: Architecture, mesh: Mesh, limit: int, frozen_itemsize: int) -> None:
    shards = mesh.shape["fsdp"] * mesh.shape["sequence"] * mesh.shape["tensor"]
    state = (frozen_itemsize or 8) * arch.num_params
    if state > shards * limit:
        what = "frozen parameters" if frozen_itemsize else "parameters and their gradients"
        in_float32 = "" if frozen_itemsize else " in float32"
        raise ConfigError(
            f"{arch.num_params / 1e9:.1f} billion {what} take "
            f"{state / 2**30:.1f} GiB{in_float32}, {state / shards / 2**30:.1f} GiB on each of the "
            f"{shards} devices that share a copy of the model, and a device has "
            f"{limit / 2**30:.1f} GiB: use at least {-(-state // limit)} devices or a smaller "
            "model; `python -m manus_jax.plan` shows what fits"
        )


def check_experts(settings: ModelSettings, arch: Architecture, replay: bool = False) -> None:
    """Raises ConfigError if a setting for experts is set and the model has none."""
    set_to = f"model.load_balancing = {settings.load_balancing:g}" * bool(settings.load_balancing)
    set_to = set_to or "vllm.router_replay" * replay
    if set_to and not arch.num_experts:
        raise ConfigError(f"{set_to} is not read: {arch.family} has no experts")


def replays_experts(config: TrainConfig) -> bool:
    """Whether the learner uses the experts that the engine chose."""
    own = config.engine_settings
    return own is not None and ENGINES[config.engine.name].returns_experts(own)


def tasks_per_update(config: TrainConfig) -> int:
    """The number of tasks in a mini-batch, at most those of a step."""
    tasks = config.train.batch_size
    return min(config.algorithm.mini_batch_size or tasks, tasks)


def updates_per_step(config: TrainConfig) -> int:
    """The number of optimizer updates in a step that uses all of its tasks."""
    return config.algorithm.ppo_epochs * -(-config.train.batch_size // tasks_per_update(config))


def policy_lr(config: TrainConfig) -> optax.Schedule:
    """The policy's schedule, a function of the number of updates so far."""
    opt = config.optimizer
    steps = config.train.total_steps - config.algorithm.critic_warmup
    by_step = learning_rate(opt.lr, opt.schedule, opt.warmup_steps, steps, opt.min_lr_ratio)
    per_step = updates_per_step(config)
    if per_step == 1:
        return by_step
    return lambda count: by_step(count // per_step)


def policy_spec(config: TrainConfig, recipe: Recipe, arch: Architecture, mesh: Mesh) -> LearnerSpec:
    """The policy, with the recipe's loss at the sampling temperature of the rollouts."""
    lora = make_lora(config.lora, arch)
    routing = (arch.num_layers, arch.experts_per_token) if replays_experts(config) else None
    graphdef, all_shapes = abstract_model(Transformer, arch, _compute(config, arch, mesh), lora)
    shapes, frozen = split_shapes(all_shapes, lora, config.compute.dtype)
    temperature = config.rollout.temperature or 1.0
    return LearnerSpec(
        shapes,
        objectives.policy(
            graphdef,
            policy_loss(recipe),
            temperature,
            with_entropy="entropy" in recipe.loss_fields,
            load_balancing=config.model.load_balancing,
        ),
        lambda p, batch: objectives.log_probs_of(graphdef, p, batch, temperature)[0],
        make_optimizer(policy_lr(config), config.optimizer),
        # The packing provides the mask and the segment ids, the model the entropy.
        tuple(f for f in recipe.loss_fields if f not in ("mask", "segment_ids", "entropy")),
        *_rows(config),
        aggregation=recipe.aggregation,
        norm_constant=config.algorithm.norm_constant,
        optimizer_on_host=config.optimizer.state == "host",
        in_place=config.compute.remat == "in_place",
        frozen=frozen,
        lora=lora,
        routing=routing,
    )


def critic_spec(config: TrainConfig, arch: Architecture, mesh: Mesh) -> LearnerSpec:
    lora = make_lora(config.lora, arch)
    graphdef, all_shapes = abstract_model(Critic, arch, _compute(config, arch, mesh), lora)
    shapes, frozen = split_shapes(all_shapes, lora, config.compute.dtype)
    lr = learning_rate(config.algorithm.critic_lr, "constant", 0, 1, 0.0)
    return LearnerSpec(
        shapes,
        objectives.critic(graphdef, config.algorithm.cliprange_value),
        lambda p, batch: objectives.values_of(graphdef, p, batch),
        make_optimizer(lr, config.optimizer),
        ("values", "returns"),
        *_rows(config),
        optimizer_on_host=config.optimizer.state == "host",
        in_place=config.compute.remat == "in_place",
        frozen=frozen,
        lora=lora,
    )


def split_shapes(shapes: Params, lora: Lora | None, dtype: str) -> tuple[Params, Frozen]:
    """The shapes in training and the frozen ones, which are in the type of the computation."""
    if lora is None:
        return shapes, ()
    trained, frozen = split(shapes)
    return trained, (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), frozen),)


def check_reference(config: TrainConfig) -> None:
    """Raises ConfigError for settings of a reference policy that LoRA does not keep."""
    kept = changed(config.algorithm, "reference", "reference_dtype")
    if config.lora.rank is not None and kept:
        raise ConfigError(
            f"algorithm.{kept[0]} is set, but with lora.rank the reference policy is the frozen "
            "base, which is not kept a second time"
        )


def _compute(config: TrainConfig, arch: Architecture, mesh: Mesh) -> Compute:
    """The compute settings; raises if the model or its rows do not divide over the mesh."""
    compute = make_compute(**dataclasses.asdict(config.compute), mesh=mesh)
    implementation = compute.kernel.implementation
    check_model(arch, mesh, implementation)
    check_batch(config.data.rows, config.data.max_length, mesh, implementation)
    return compute


def _rows(config: TrainConfig) -> tuple[RowShape, int, int]:
    """The shape of packed rows, and the micro-batches of an update and of a step if each row holds
    one segment."""
    train, rows = config.train, config.data.rows
    group_size = train.group_size * episodes_per_spec(config.rollout)
    micro_batches = lambda tasks: -(-tasks * group_size // rows)
    shape = RowShape(rows, config.data.max_length)
    return shape, micro_batches(tasks_per_update(config)), micro_batches(train.batch_size)

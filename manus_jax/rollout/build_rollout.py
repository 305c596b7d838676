"""Builds environment servers and engines from settings, for training and evaluation."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jax.sharding import Mesh

from envs import registry
from manus_jax.agentgym.environments import (
    check_interpreters,
    open_environments,
    register_adapted,
    server_addresses,
)
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.table import environment
from manus_jax.config.binding import (
    ConfigError,
    build,
    engine_groups,
    refuse_unread,
    setting_names,
)
from manus_jax.config.commands import EndpointConfig, EvaluateConfig, TrainConfig
from manus_jax.config.server_settings import EnvPoolSettings, VllmSettings
from manus_jax.config.settings import EngineSettings, EnvSettings, RolloutSettings
from manus_jax.engines.cached_decoder import CachedDecoder
from manus_jax.engines.jax_engine import JaxEngine
from manus_jax.engines.layout import learner_devices, make_layout, split_devices
from manus_jax.engines.protocol import Engine
from manus_jax.models.architecture import Architecture
from manus_jax.models.loading import PolicySource
from manus_jax.models.transformer import Params
from manus_jax.registry import Registry
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.strategies import check_strategy
from manus_jax.status import STATUS
from manus_jax.vllm.gpu_partition import claim_gpus
from manus_jax.vllm.open_pool import check_servers, open_vllm
from manus_jax.vllm.pool import VllmPool


def check_play(env: EnvSettings, rollout: RolloutSettings) -> None:
    """Raises for an unknown strategy, an unknown environment, one without a server, or a format
    that it does not support."""
    for name in env.names:
        try:
            register_adapted(name)
            row = environment(name)
        except (ValueError, registry.UnknownEnvironment) as error:
            raise ConfigError(f"env.names: {error}") from None
        if name not in env.urls and name not in registry.ENVIRONMENTS:
            raise ConfigError(
                f"env.names: {name} has no embedded server: give the addresses of its servers in "
                f"env.urls, or choose from {', '.join(sorted(registry.ENVIRONMENTS))}"
            )
        try:
            server_addresses(name, env.urls.get(name, "embedded"))
        except ValueError as error:
            raise ConfigError(f"env.urls: {error}") from None
        try:
            format_for(row, rollout.action_format)
        except ValueError as error:
            raise ConfigError(f"rollout.action_format: {error}") from None
    check_strategy(rollout, env.names)
    check_interpreters(env.python)


@contextlib.contextmanager
def open_servers(env: EnvSettings, settings: EnvPoolSettings) -> Iterator[EnvironmentPool]:
    """Opens the environment servers, configured or started here, for the duration of the block."""
    servers = {name: env.urls.get(name, "embedded") for name in env.names}
    with contextlib.ExitStack() as stack:
        try:
            pool = stack.enter_context(
                open_environments(servers, env.servers_per_env, settings, interpreters=env.python)
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"env.urls: {error}") from None
        stack.enter_context(STATUS.serving("environments", pool.problems))
        yield pool


EngineFactory = Callable[[PolicySource, Params, EngineSettings, Any, int], Engine]
"""(model, weights, engine settings, the engine's own settings, max_length) → a running engine."""


@dataclasses.dataclass(frozen=True)
class EngineKind:
    """A registered engine. The functions get its own settings, an instance of `settings`.

    Args:
      engine: its class, which declares capabilities.
      open: its factory.
      reads: the settings that it reads; a binding that it does not read is an error.
      settings: its own gin group (`@settings(name, of_engine=True)`), if it has one.
      takes_adapters: whether it gets adapters with LoRA; otherwise it gets merged weights.
      returns_experts: whether its generations have `experts`; the learner then replays them.
      claim: reserves devices before JAX uses any; returns the settings with those devices.
      check: raises, before weights are loaded, if the engine cannot be opened. It also gets the
        length of episodes and, as far as they are known, the architecture, the rank of adapters and
        the path of their base.
    """

    engine: type[Engine]
    open: EngineFactory
    reads: frozenset[str]
    settings: type | None
    takes_adapters: Callable[[Any], bool] = lambda _: False
    returns_experts: Callable[[Any], bool] = lambda _: False
    claim: Callable[[Any], Any] = lambda own: own
    check: Callable[[Any, int, Architecture | None, int | None, Path | None], None] = lambda *_: (
        None
    )


ENGINES: Registry[EngineKind] = Registry("engine")


def engine_kind(
    engine: type[Engine],
    reads: Sequence[str] = ("engine",),
    settings: type | None = None,
    **functions: Any,
) -> Callable[[EngineFactory], EngineKind]:
    """Decorator: turns `open(source, params, settings, own_settings, max_length)` into an engine.

    `reads` are the settings of `engine.*` that it reads, besides its own; `functions` are those of
    `EngineKind`.
    """

    def make(factory: EngineFactory) -> EngineKind:
        own = [settings.gin_name] if settings is not None else []  # type: ignore[attr-defined]
        read = setting_names("engine.name", *reads, *own)
        return EngineKind(engine, factory, read, settings, **functions)

    return make


def unread_by_engine(name: str) -> frozenset[str]:
    """The engine settings that the named engine does not read."""
    return setting_names("engine", *engine_groups()) - ENGINES[name].reads


def read_with_engine(read: frozenset[str], name: str) -> frozenset[str]:
    """The settings that a command reads: its own, `read`, and those of the named engine."""
    return (read - unread_by_engine(name)) | (ENGINES[name].reads - setting_names("engine"))


C = TypeVar("C", TrainConfig, EvaluateConfig, EndpointConfig)


def with_engine_settings(config: C) -> C:
    """Adds the selected engine's own group; a binding that it does not read is an error."""
    name = config.engine.name
    readers = {f"the engine {other!r}": kind.reads for other, kind in ENGINES.items()}
    refuse_unread(f"the engine {name!r}", unread_by_engine(name).__contains__, readers)
    group = ENGINES[name].settings
    if group is None:
        return config
    (own,) = build(group)
    return dataclasses.replace(config, engine_settings=own)


def claim_devices(config: TrainConfig) -> TrainConfig:
    """Reserves the engine's devices; to be called before JAX uses any."""
    claimed = ENGINES[config.engine.name].claim(config.engine_settings)
    return dataclasses.replace(config, engine_settings=claimed)


def embedded_decoder(
    settings: EngineSettings,
    arch: Architecture,
    max_length: int,
    mesh: Mesh,
    devices: Sequence[Any] = (),
    platform: str | None = None,
) -> CachedDecoder:
    """The decoder of the embedded engine beside a learner's mesh, without weights or cache.

    Its `layout` has the bytes per device, and `programs()` what to compile. It uses its own
    `devices` or, if it has none, those of the mesh that belong to process 0. `platform` is that of
    the devices, if they are stand-ins. EngineError if the settings do not divide over the devices.
    """
    layout = make_layout(
        arch,
        devices or [device for device in mesh.devices.flat if device.process_index == 0],
        slots=settings.slots,
        max_length=max_length,
        tensor=settings.tensor or mesh.shape["tensor"],
        cache_tokens=settings.cache_tokens,
        dtype=settings.dtype,
        platform=platform,
    )
    return CachedDecoder(layout, settings.max_steps)


_EMBEDDED_READS = ("slots", "cache_tokens", "devices", "tensor", "dtype", "max_steps")


@ENGINES.register("jax")
@engine_kind(JaxEngine, reads=[f"engine.{name}" for name in _EMBEDDED_READS])
def _embedded(
    source: PolicySource, params: Params, settings: EngineSettings, own: None, max_length: int
) -> Engine:
    devices, tensor, slots = _embedded_sizes(settings, params)
    return JaxEngine(
        source.card.architecture,
        params,
        slots=slots,
        max_length=max_length,
        cache_tokens=settings.cache_tokens,
        devices=devices,
        tensor=tensor,
        decode=source.tokenizer.decode,
        dtype=settings.dtype,
        max_steps=settings.max_steps,
    )


def _embedded_sizes(settings: EngineSettings, params: Params) -> tuple[list[Any], int, int]:
    """The embedded engine's devices, those that share a copy of the weights, and its slots."""
    _, own_devices = split_devices(settings.devices)
    devices, tensor = own_devices or learner_devices(params), settings.tensor or 1
    copies = max(1, len(devices) // tensor)
    # Evaluation needs only one slot per episode.
    return [*devices], tensor, -(-settings.slots // copies) * copies


@ENGINES.register("vllm")
@engine_kind(
    VllmPool,
    reads=("engine.slots", "engine.dtype"),
    settings=VllmSettings,
    takes_adapters=lambda own: own.adapters,
    returns_experts=lambda own: own.router_replay,
    claim=claim_gpus,
    check=check_servers,
)
def _vllm_pool(
    source: PolicySource,
    params: Params,
    settings: EngineSettings,
    own: VllmSettings,
    max_length: int,
) -> Engine:
    return open_vllm(
        source.card,
        params,
        own,
        slots=settings.slots,
        dtype=settings.dtype,
        max_length=max_length,
    )


def check_engine(
    source: PolicySource,
    params: Params,
    settings: EngineSettings,
    own_settings: Any,
    max_length: int,
) -> None:
    """Raises if `open_engine` cannot open the engine, as far as this is known without weights."""
    kind = ENGINES[settings.name]
    kind.check(own_settings, max_length, source.card.architecture, None, None)
    if kind.engine.on_learner_device:
        devices, tensor, slots = _embedded_sizes(settings, params)
        make_layout(
            source.card.architecture,
            devices,
            slots=slots,
            max_length=max_length,
            tensor=tensor,
            cache_tokens=settings.cache_tokens,
            dtype=settings.dtype,
        )


@contextlib.contextmanager
def open_engine(
    source: PolicySource,
    params: Params,
    settings: EngineSettings,
    own_settings: Any,
    max_length: int,
) -> Iterator[Engine]:
    """Opens the configured engine with the given weights; closes it at the end of the block."""
    engine = ENGINES[settings.name].open(source, params, settings, own_settings, max_length)
    try:
        yield engine
    finally:
        engine.close()

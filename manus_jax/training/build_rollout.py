"""Environment servers and engines from settings, shared by training and evaluation."""

import contextlib
from collections.abc import Callable, Iterator

from envs import registry
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.settings import open_environments
from manus_jax.agentgym.table import environment
from manus_jax.config.binding import ConfigError, refuse_unread, setting_names
from manus_jax.config.settings import EngineSettings, EnvSettings, RolloutSettings
from manus_jax.engines.jax_engine import JaxEngine
from manus_jax.engines.protocol import Engine, EngineError
from manus_jax.models.loading import PolicySource
from manus_jax.models.transformer import Params
from manus_jax.registry import Registry
from manus_jax.rollout.action_formats import format_for
from manus_jax.vllm.options import open_vllm, parse_options


def check_play(env: EnvSettings, rollout: RolloutSettings) -> None:
    """Raises for an environment that is unknown or has no server, or an unsuitable format."""
    for name in env.names:
        try:
            row = environment(name)
        except ValueError as error:
            raise ConfigError(f"env.names: {error}") from None
        if name not in env.urls and name not in registry.ENVIRONMENTS:
            raise ConfigError(
                f"env.names: {name} has no embedded server: give the addresses of its servers in "
                f"env.urls, or choose from {', '.join(sorted(registry.ENVIRONMENTS))}"
            )
        try:
            format_for(row, rollout.action_format)
        except ValueError as error:
            raise ConfigError(f"rollout.action_format: {error}") from None


@contextlib.contextmanager
def open_servers(env: EnvSettings) -> Iterator[EnvironmentPool]:
    """The environments' servers, given or started here, for the duration of the block."""
    servers = {name: env.urls.get(name, "embedded") for name in env.names}
    with contextlib.ExitStack() as stack:
        try:
            pool = stack.enter_context(open_environments(servers, env.servers_per_env))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"env.urls: {error}") from None
        yield pool


EngineFactory = Callable[[PolicySource, Params, EngineSettings, int], Engine]
"""(model, its weights, settings, maximum tokens of an episode) → a running engine."""

ENGINES: Registry[EngineFactory] = Registry("engine")


def reads(*names: str) -> Callable[[EngineFactory], EngineFactory]:
    """Decorator: declares the settings that an engine reads, as `group` or `group.field`.

    A factory without this declaration reads all of `engine.*`.
    """

    def declare(make: EngineFactory) -> EngineFactory:
        make.reads = setting_names("engine.name", *names)  # type: ignore[attr-defined]
        return make

    return declare


def settings_read_by(name: str) -> frozenset[str]:
    """The settings that the engine of this name reads."""
    return getattr(ENGINES[name], "reads", setting_names("engine"))


def unread_by_engine(name: str) -> frozenset[str]:
    """The settings of engines that the engine of this name does not read."""
    every = setting_names("engine").union(*(settings_read_by(other) for other in ENGINES))
    return every - settings_read_by(name)


def refuse_unread_by_engine(name: str) -> None:
    """Raises for a binding that only other engines read."""
    readers = {f"the engine {other!r}": settings_read_by(other) for other in ENGINES}
    refuse_unread(f"the engine {name!r}", unread_by_engine(name).__contains__, readers)


@ENGINES.register("jax")
@reads("engine.slots", "engine.dtype", "engine.max_steps")
def _embedded(
    source: PolicySource, params: Params, settings: EngineSettings, max_length: int
) -> Engine:
    return JaxEngine(
        source.card.architecture,
        params,
        slots=settings.slots,
        max_length=max_length,
        decode=source.tokenizer.decode,
        dtype=settings.dtype,
        max_steps=settings.max_steps,
    )


@ENGINES.register("vllm")
@reads("engine.slots", "engine.dtype", "engine.options")
def _vllm_pool(
    source: PolicySource, params: Params, settings: EngineSettings, max_length: int
) -> Engine:
    return open_vllm(
        source.card,
        params,
        settings.options,
        slots=settings.slots,
        dtype=settings.dtype,
        max_length=max_length,
    )


def check_engine(settings: EngineSettings) -> None:
    """Raises for an engine that does not exist, and for options that it does not have."""
    if "engine.options" not in settings_read_by(settings.name) and settings.options:
        option = next(iter(settings.options))
        raise ConfigError(
            f"engine.options has {option!r}, but the engine {settings.name!r} has no options"
        )
    if settings.name == "vllm":
        try:
            parse_options(settings.options)
        except EngineError as error:
            raise ConfigError(str(error)) from None


@contextlib.contextmanager
def open_engine(
    source: PolicySource, params: Params, settings: EngineSettings, max_length: int
) -> Iterator[Engine]:
    """The configured engine with the given weights, closed at the end of the block."""
    engine = ENGINES[settings.name](source, params, settings, max_length)
    try:
        yield engine
    finally:
        engine.close()

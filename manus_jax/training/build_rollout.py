"""Settings into the parts that play: rollout settings, environment servers, an engine.

Training and evaluation play through the same parts, so that they mean the same by each setting.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from envs import registry
from manus_jax.agentgym.environments import open_environments
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.table import environment
from manus_jax.config.binding import ConfigError
from manus_jax.config.server_settings import EnvPoolSettings, VllmSettings
from manus_jax.config.settings import EngineSettings, EnvSettings, RolloutGroup
from manus_jax.engines.jax_engine import JaxEngine
from manus_jax.engines.protocol import Engine, Sampling
from manus_jax.models.loading import PolicySource
from manus_jax.models.transformer import Params
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.prompts import PromptSettings
from manus_jax.rollout.settings import RolloutSettings
from manus_jax.vllm.open_pool import open_vllm
from manus_jax.vllm.pool import VllmPool


def make_rollout(
    group: RolloutGroup, seed: int, temperature: float | None = None
) -> RolloutSettings:
    """How episodes are played; `temperature` overrides the group's."""
    try:
        return RolloutSettings(
            seed=seed,
            max_turns=group.max_turns,
            sampling=Sampling(
                temperature=group.temperature if temperature is None else temperature,
                top_p=group.top_p,
                top_k=group.top_k,
                max_tokens=group.max_tokens_per_turn,
            ),
            max_total_tokens=group.max_total_tokens,
            max_observation_tokens=group.max_observation_tokens,
            memory_turns=group.memory_turns,
            action_format=group.action_format,
            prompt=PromptSettings(group.prompt_source, examples=group.prompt_examples),
            invalid_action_penalty=group.invalid_action_penalty,
            generation_timeout=group.generation_timeout,
            max_in_flight=group.max_in_flight,
        )
    except ValueError as error:
        raise ConfigError(f"rollout: {error}") from None


def check_play(env: EnvSettings, rollout: RolloutSettings) -> None:
    """Raises for an unknown environment, one not served here, or settings that cannot play it."""
    for name in env.names:
        try:
            row = environment(name)
        except ValueError as error:
            raise ConfigError(f"env.names: {error}") from None
        if name not in env.urls and name not in registry.ENVIRONMENTS:
            raise ConfigError(
                f"env.names: {name} is not served here: give the addresses of its servers in "
                f"env.urls, or choose from {', '.join(sorted(registry.ENVIRONMENTS))}"
            )
        try:
            format_for(row, rollout.action_format)
        except ValueError as error:
            raise ConfigError(f"rollout.action_format: {error}") from None
    how = rollout.sampling
    if how.temperature < 0 or how.top_k < 0 or not 0 < how.top_p <= 1:
        raise ConfigError(
            f"rollout.temperature = {how.temperature:g} and rollout.top_k = {how.top_k} must not "
            f"be negative, rollout.top_p = {how.top_p:g} must be above 0 and at most 1"
        )


@contextlib.contextmanager
def open_servers(env: EnvSettings, settings: EnvPoolSettings) -> Iterator[EnvironmentPool]:
    """The environments' servers, given or started here, for the duration of the block."""
    servers = {name: env.urls.get(name, "embedded") for name in env.names}
    with contextlib.ExitStack() as stack:
        try:
            pool = stack.enter_context(open_environments(servers, env.servers_per_env, settings))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"env.urls: {error}") from None
        yield pool


EngineFactory = Callable[[PolicySource, Params, EngineSettings, Any, int], Engine]
"""(model, weights, engine settings, the engine's own settings, max_length) → a running engine."""


@dataclasses.dataclass(frozen=True)
class EngineKind:
    """A registered engine: its class, which has the capabilities, and how it is opened."""

    engine: type[Engine]
    settings: type | None  # its own gin group, read only if this engine is chosen
    open: EngineFactory


ENGINES: dict[str, EngineKind] = {}


def register_engine(
    name: str, engine: type[Engine], settings: type | None = None
) -> Callable[[EngineFactory], EngineFactory]:
    """Decorator: registers `open(source, params, settings, own_settings, max_length)`.

    `settings` is the engine's own gin group (`config.binding.settings`), if it has one.
    """

    def register(open_: EngineFactory) -> EngineFactory:
        if name in ENGINES:
            raise ValueError(f"there is an engine {name!r} already; choose another name")
        ENGINES[name] = EngineKind(engine, settings, open_)
        return open_

    return register


def engine_kind(name: str) -> EngineKind:
    if name not in ENGINES:
        raise ConfigError(f"engine.name = {name!r}; there are {', '.join(ENGINES)}")
    return ENGINES[name]


@register_engine("jax", JaxEngine)
def _embedded(
    source: PolicySource, params: Params, settings: EngineSettings, own: None, max_length: int
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


@register_engine("vllm", VllmPool, VllmSettings)
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


@contextlib.contextmanager
def open_engine(
    source: PolicySource,
    params: Params,
    settings: EngineSettings,
    own_settings: Any,
    max_length: int,
) -> Iterator[Engine]:
    """The chosen engine with the given weights, closed at the end of the block."""
    kind = engine_kind(settings.name)
    engine = kind.open(source, params, settings, own_settings, max_length)
    try:
        yield engine
    finally:
        engine.close()

"""`engine.options` of the engine "vllm" into a pool that runs.

Either `urls` names servers that run elsewhere, or `servers` says how many to start here. Weights go
through a directory that learner and servers both see; with servers of one's own that may be a
temporary one.
"""

import dataclasses
import difflib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manus_jax.models.huggingface import ModelCard
from manus_jax.rollout.engine import EngineError
from manus_jax.rollout.vllm_fleet import PoolSettings
from manus_jax.rollout.vllm_pool import VllmPool
from manus_jax.rollout.vllm_processes import ManagedServers, ServerRecipe
from manus_jax.rollout.vllm_routing import RoutingPolicy
from manus_jax.weights.publisher import Publisher


@dataclasses.dataclass(frozen=True)
class VllmOptions:
    """What `engine.options` may hold."""

    urls: tuple[str, ...] = ()  # of servers that run; or
    servers: int = 0  # how many to start on this machine
    python: str | None = None  # vLLM's interpreter; by default MANUS_JAX_VLLM_PYTHON's
    vllm_arguments: tuple[str, ...] = ()  # for servers that are started
    weights_dir: str | None = None  # where versions are published; servers must see it too
    push: bool = True  # False: servers keep the weights that they have, to be evaluated
    snapshot_every: int = 20  # versions from one whole copy of the weights to the next
    attempts: int = 4  # at one request
    patience: float = 600.0  # seconds without any server in service
    imbalance: int = 8  # requests more than elsewhere before a session moves


def parse_options(options: Mapping[str, Any]) -> VllmOptions:
    """EngineError for an option that does not exist, or options that do not go together."""
    known = [field.name for field in dataclasses.fields(VllmOptions)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise EngineError(
                f"engine.options has {name!r}; the engine 'vllm' has {', '.join(known)}{hint}"
            )
    lists = {name: tuple(options[name]) for name in ("urls", "vllm_arguments") if name in options}
    parsed = VllmOptions(**{**options, **lists})
    if bool(parsed.urls) == bool(parsed.servers):
        raise EngineError(
            "engine.options needs either urls, the addresses of vLLM servers, or servers, how many "
            "to start here"
        )
    if parsed.urls and parsed.push and parsed.weights_dir is None:
        raise EngineError(
            "engine.options has urls and no weights_dir: name a directory that the servers see "
            "too, or set push to False to play with the weights that they have"
        )
    if parsed.servers and not parsed.push:
        raise EngineError("engine.options: servers that are started here need push")
    return parsed


def open_vllm(
    card: ModelCard,
    params: Any,
    options: Mapping[str, Any],
    *,
    slots: int,
    dtype: str,
    max_length: int,
) -> VllmPool:
    """A pool with the given weights as version 0; closing it ends what it started."""
    parsed = parse_options(options)
    settings = PoolSettings(
        attempts=parsed.attempts,
        patience=parsed.patience,
        routing=RoutingPolicy(imbalance=parsed.imbalance),
    )
    if not parsed.push:
        return VllmPool(parsed.urls, max_length, settings=settings)
    closing: list[Callable[[], None]] = []
    try:
        if parsed.weights_dir is None:
            root = Path(tempfile.mkdtemp(prefix="manus-jax-vllm-"))
            closing.append(lambda: shutil.rmtree(root, ignore_errors=True))
        else:
            root = Path(parsed.weights_dir)
        publisher = Publisher(root / "versions", card, snapshot_every=parsed.snapshot_every)
        closing.append(publisher.close)
        first = publisher.publish(params, 0)
        assert first is not None
        urls = list(parsed.urls)
        if parsed.servers:
            started = ManagedServers(
                ServerRecipe(
                    parsed.python,
                    publisher.root,
                    max_length,
                    -(-slots // parsed.servers),
                    dtype,
                    parsed.vllm_arguments,
                ),
                parsed.servers,
                root / "logs",
            )
            closing.append(started.close)
            urls += started.urls
        return VllmPool(
            urls,
            max_length,
            publisher=publisher,
            target=first.identity,
            settings=settings,
            closing=closing,
        )
    except BaseException:
        for close in reversed(closing):
            close()
        raise

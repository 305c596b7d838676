"""`engine.options` of the engine "vllm" into a pool that runs.

Either `urls` names servers that run elsewhere, or `address_file` a file in which such servers write
their addresses, or `servers` (or `gpus`) says how many to start here. Weights go through a
directory that learner and servers both see; with servers of one's own that may be a temporary one.
"""

import dataclasses
import difflib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manus_jax.config.settings import EngineSettings
from manus_jax.engines.protocol import EngineError
from manus_jax.models.huggingface import ModelCard
from manus_jax.vllm.access import read_api_key
from manus_jax.vllm.addresses import AddressFollower, read_addresses
from manus_jax.vllm.fleet import PoolSettings
from manus_jax.vllm.gpu_partition import (
    LEARNER_MEMORY_VARIABLE,
    ORDER_VARIABLE,
    VISIBLE_VARIABLE,
    group_gpus,
    split_gpus,
    visible_gpus,
)
from manus_jax.vllm.managed_servers import ManagedServers, ServerRecipe, answers
from manus_jax.vllm.pool import VllmPool
from manus_jax.vllm.routing import RoutingPolicy
from manus_jax.weights.publisher import Publisher

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class VllmOptions:
    """What `engine.options` may hold."""

    urls: tuple[str, ...] = ()  # of servers that run; or
    address_file: str | None = None  # where such servers write their addresses; or
    servers: int = 0  # how many to start on this machine; 0 with gpus: as many as they are for
    gpus: int | tuple[str, ...] | None = None  # of this machine for them, the last ones or by name
    tensor_parallel: int = 1  # GPUs of each server that is started
    gpu_memory_utilization: float | None = None  # the share of a GPU that vLLM takes
    learner_memory_fraction: float | None = None  # and the learner, of its own
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
    if isinstance(gpus := options.get("gpus"), (list, tuple)):
        lists["gpus"] = tuple(str(name) for name in gpus)
    parsed = VllmOptions(**{**options, **lists})
    _check_sources(parsed)
    _check_gpus(parsed)
    return parsed


def _check_sources(parsed: VllmOptions) -> None:
    started = bool(parsed.servers) or parsed.gpus is not None
    elsewhere = [name for name in ("urls", "address_file") if getattr(parsed, name)]
    if len(elsewhere) + started != 1:
        raise EngineError(
            "engine.options needs either urls, the addresses of vLLM servers, or address_file, "
            "where they write them, or servers, how many to start here"
        )
    if elsewhere and parsed.push and parsed.weights_dir is None:
        raise EngineError(
            f"engine.options has {elsewhere[0]} and no weights_dir: name a directory that the "
            "servers see too, or set push to False to play with the weights that they have"
        )
    if started and not parsed.push:
        raise EngineError("engine.options: servers that are started here need push")
    if elsewhere and parsed.tensor_parallel != 1:
        raise EngineError(
            f"engine.options has {elsewhere[0]} and tensor_parallel, which is for servers that are "
            "started here"
        )


def _check_gpus(parsed: VllmOptions) -> None:
    if parsed.servers < 0 or parsed.tensor_parallel < 1:
        raise EngineError("engine.options: servers and tensor_parallel are numbers of things")
    shares = {
        name: getattr(parsed, name)
        for name in ("gpu_memory_utilization", "learner_memory_fraction")
        if getattr(parsed, name) is not None
    }
    for name, share in shares.items():
        if parsed.gpus is None:
            raise EngineError(f"engine.options has {name}, which goes with gpus")
        if not 0 < share <= 1:
            raise EngineError(f"engine.options: {name} = {share:g} must be above 0 and at most 1")
    if isinstance(parsed.gpus, int) and parsed.gpus < 1:
        raise EngineError(f"engine.options: gpus = {parsed.gpus}; at least 1, or leave it out")
    if isinstance(parsed.gpus, tuple) and len(set(parsed.gpus)) != len(parsed.gpus):
        raise EngineError(f"engine.options: gpus names one twice: {', '.join(parsed.gpus)}")
    if parsed.gpus is not None:
        count = parsed.gpus if isinstance(parsed.gpus, int) else len(parsed.gpus)
        group_gpus([""] * count, parsed.servers, parsed.tensor_parallel)


def claim_gpus(engine: EngineSettings) -> EngineSettings:
    """Leaves this process the GPUs that vLLM does not get; the settings, with vLLM's by name.

    JAX looks at the environment when it starts its back end, so this comes before.
    """
    if engine.name != "vllm":
        return engine
    parsed = parse_options(engine.options)
    if parsed.gpus is None:
        return engine
    vllm, learner = parsed.gpu_memory_utilization, parsed.learner_memory_fraction
    visible = visible_gpus()
    shared = vllm is not None and learner is not None
    split = split_gpus(visible, parsed.gpus, parsed.servers, parsed.tensor_parallel, shared)
    if set(split.learner) & set(split.taken):
        assert vllm is not None and learner is not None
        if vllm + learner > 1:
            raise EngineError(
                f"engine.options: learner and vLLM share all {len(visible)} GPUs, and "
                f"gpu_memory_utilization {vllm:g} + learner_memory_fraction {learner:g} = "
                f"{vllm + learner:g} of each is more than there is"
            )
    os.environ[VISIBLE_VARIABLE] = ",".join(split.learner)
    os.environ.setdefault(ORDER_VARIABLE, "PCI_BUS_ID")
    if learner is not None:
        os.environ[LEARNER_MEMORY_VARIABLE] = f"{learner:g}"
    return dataclasses.replace(engine, options={**engine.options, "gpus": split.taken})


def check_gpus_of_many(engine: EngineSettings) -> None:
    """EngineError where a job of several processes would split the GPUs of one machine."""
    if engine.name == "vllm" and parse_options(engine.options).gpus is not None:
        raise EngineError(
            "engine.options: gpus splits one machine between one learner process and vLLM; where "
            "several processes learn together, start the servers apart (scripts/serve_vllm.sh) and "
            "give their urls or an address_file"
        )


def open_vllm(
    card: ModelCard | None,
    params: Any,
    options: Mapping[str, Any],
    *,
    slots: int,
    dtype: str,
    max_length: int,
) -> VllmPool:
    """A pool with the given weights as version 0; closing it ends what it started.

    The key that servers elsewhere ask for is in the environment. Without a card, which is for
    servers that keep their weights, they may serve anything.
    """
    parsed = parse_options(options)
    settings = PoolSettings(
        attempts=parsed.attempts,
        patience=parsed.patience,
        routing=RoutingPolicy(imbalance=parsed.imbalance),
        api_key=read_api_key(None),
    )
    closing: list[Callable[[], None]] = []
    try:
        publisher, first = None, None
        if parsed.push:
            assert card is not None
            root = _weights_root(parsed, closing)
            publisher = Publisher(root / "versions", card, snapshot_every=parsed.snapshot_every)
            closing.append(publisher.close)
            first = publisher.publish(params, 0)
            assert first is not None
        if parsed.address_file is not None:
            urls = _await_addresses(Path(parsed.address_file), parsed.patience)
        elif parsed.urls:
            urls = list(parsed.urls)
        else:
            assert publisher is not None
            started = _start(parsed, publisher.root, slots, dtype, max_length, root / "logs")
            closing.append(started.close)
            urls = started.urls
        follower = None
        if parsed.address_file is not None:
            follower = AddressFollower(Path(parsed.address_file), urls)
            closing.append(follower.close)
        pool = VllmPool(
            urls,
            max_length,
            publisher=publisher,
            target=None if first is None else first.identity,
            model=None if card is None else card.architecture,
            settings=settings,
            closing=closing,
        )
        if follower is not None:
            follower.start(pool.add_server, pool.remove_server)
        return pool
    except BaseException:
        for close in reversed(closing):
            close()
        raise


def _weights_root(parsed: VllmOptions, closing: list[Callable[[], None]]) -> Path:
    if parsed.weights_dir is not None:
        return Path(parsed.weights_dir)
    root = Path(tempfile.mkdtemp(prefix="manus-jax-vllm-"))
    closing.append(lambda: shutil.rmtree(root, ignore_errors=True))
    return root


def _start(
    parsed: VllmOptions, model: Path, slots: int, dtype: str, max_length: int, logs: Path
) -> ManagedServers:
    """Servers on this machine, each with its GPUs if there are any."""
    groups: list[tuple[str, ...]] = [()] * parsed.servers
    if parsed.gpus is not None:
        gpus = parsed.gpus
        if isinstance(gpus, int):  # nobody else here wants a GPU
            gpus = split_gpus(visible_gpus(), gpus, 0, 1, shared=True).taken
        groups = group_gpus(gpus, parsed.servers, parsed.tensor_parallel)
    more: list[str] = []
    if parsed.tensor_parallel > 1:
        more += ["--tensor-parallel-size", str(parsed.tensor_parallel)]
    if parsed.gpu_memory_utilization is not None:
        more += ["--gpu-memory-utilization", f"{parsed.gpu_memory_utilization:g}"]
    recipe = ServerRecipe(
        parsed.python,
        model,
        max_length,
        -(-slots // len(groups)),
        dtype,
        (*more, *parsed.vllm_arguments),
    )
    return ManagedServers(recipe, groups, logs)


def _await_addresses(path: Path, patience: float) -> list[str]:
    """What the file holds as soon as one of the servers in it answers."""
    deadline = time.monotonic() + patience
    while True:
        urls = read_addresses(path)
        if any(answers(url) for url in urls):
            return urls
        if time.monotonic() > deadline:
            why = f"none of its {len(urls)} servers answers" if urls else "there is none in it"
            raise EngineError(
                f"no vLLM server in the address file {path} after {patience:g} s: {why}; start "
                f"them with `python -m manus_jax.serve --address-file {path}`"
            )
        _log.info("waiting for a vLLM server in %s", path)
        time.sleep(_LOOK_SECONDS)

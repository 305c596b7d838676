"""Publishes a run's checkpoints as versions, and keeps vLLM servers at the newest one."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from manus_jax.config.server_settings import VllmSettings
from manus_jax.models import orbax_params
from manus_jax.models.huggingface import ModelCard
from manus_jax.models.loading import load_step
from manus_jax.vllm.access import read_api_key
from manus_jax.vllm.pool import VllmPool
from manus_jax.weights.manifest import published_versions
from manus_jax.weights.mirror import newest
from manus_jax.weights.publisher import Published, Publisher


def publish_to_servers(
    run: Path,
    to: Path,
    poll: float | None,
    snapshot_every: int,
    servers: Sequence[str],
    report: Callable[[str], None],
) -> None:
    """Publishes checkpoints of `run` in `to` and loads each version on the servers.

    `poll`: seconds between two checks for a new checkpoint; None publishes the newest and returns
    when all servers hold it. `report` gets a line for each version.
    """
    with contextlib.ExitStack() as stack:
        pool = _open_pool(servers, run, to, stack)
        for published in publish_run(run, to, poll, snapshot_every):
            report(_describe(published))
            if pool is None:
                pool = _open_pool(servers, run, to, stack)
            else:
                pool.load_version(published.identity)
        if pool is not None:
            pool.await_all()


def publish_run(
    run: Path, to: Path, poll: float | None = None, snapshot_every: int = 20
) -> Iterator[Published]:
    """Publishes steps as versions of the same number, skipping one that is already there."""
    publisher = None
    try:
        for step_dir, card in _newest_steps(run, poll):
            version = int(step_dir.name)
            if publisher is None:
                publisher = Publisher(to, card, snapshot_every=snapshot_every)
                if version in published_versions(to):
                    continue
            published = publisher.publish(load_step(step_dir, card), version)
            if published is not None:
                yield published
    finally:
        if publisher is not None:
            publisher.close()


def _newest_steps(run: Path, poll: float | None) -> Iterator[tuple[Path, ModelCard]]:
    """The newest checkpoint's directory and card, and with `poll` each newer one's."""
    seen = -1
    while True:
        step_dir, card_dir = orbax_params.find_checkpoint(run)
        if int(step_dir.name) > seen:
            seen = int(step_dir.name)
            yield step_dir, ModelCard.load(card_dir)
        if poll is None:
            return
        time.sleep(poll)


def _open_pool(
    servers: Sequence[str], run: Path, to: Path, stack: contextlib.ExitStack
) -> VllmPool | None:
    """A pool that loads the newest version in `to`; None without servers or versions."""
    target = newest(to)
    if target is None or not servers:
        return None
    _, card_dir = orbax_params.find_checkpoint(run)
    pool = VllmPool(
        servers,
        1,
        VllmSettings(urls=tuple(servers), weights_dir=str(to)),
        root=to,
        target=target,
        model=ModelCard.load(card_dir).architecture,
        api_key=read_api_key(None),
    )
    stack.callback(pool.close)
    return pool


def _describe(published: Published) -> str:
    parts = [f"version {published.identity.number}"]
    parts.append(f"{published.changed} of {published.elements} weights changed")
    if published.delta_bytes is not None:
        parts.append(f"delta {published.delta_bytes} bytes")
    if published.snapshot_bytes is not None:
        parts.append(f"snapshot {published.snapshot_bytes} bytes")
    return ", ".join(parts)

"""Publishes a run's checkpoints as versions, and keeps vLLM servers at the newest one."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from manus_jax.config.server_settings import VllmSettings
from manus_jax.models import orbax_params
from manus_jax.models.architecture import Architecture
from manus_jax.models.huggingface import ModelCard
from manus_jax.models.loading import open_step
from manus_jax.models.orbax_params import CheckpointError
from manus_jax.vllm.access import read_api_key
from manus_jax.vllm.client import IncompatibleServer, ServerFailure, VllmServer
from manus_jax.vllm.pool import VllmPool
from manus_jax.weights.host_tensors import tensor_sources
from manus_jax.weights.manifest import WeightsError, published_versions, read_manifest
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
    urls = tuple(dict.fromkeys(servers))
    api_key = read_api_key(None)
    _, card_dir = orbax_params.find_checkpoint(run)
    model = ModelCard.load(card_dir).architecture
    for url in urls:
        _refuse_incompatible(VllmServer(url, api_key=api_key), model)
    pool = None
    with contextlib.ExitStack() as stack:
        for published in publish_run(run, to, poll, snapshot_every):
            report(_describe(published, to))
            if pool is not None:
                pool.load_version(published.identity)
            elif urls:
                pool = VllmPool(
                    urls,
                    1,
                    VllmSettings(urls=urls, weights_dir=str(to)),
                    root=to,
                    target=published.identity,
                    model=model,
                    api_key=api_key,
                )
                stack.callback(pool.close)
        if pool is not None:
            pool.await_all()


def publish_run(
    run: Path, to: Path, poll: float | None = None, snapshot_every: int = 20
) -> Iterator[Published]:
    """Publishes steps as versions of the same number; one that is already there counts too."""
    publisher = None
    try:
        for step_dir, card in _newest_steps(run, poll):
            version = int(step_dir.name)
            existing = _published_already(to, version, card) if publisher is None else None
            try:
                params = open_step(step_dir, card)
            except CheckpointError:
                if poll is not None and not step_dir.exists():
                    continue  # the run has removed it in favour of a newer one
                raise
            publisher = publisher or Publisher(to, card, snapshot_every=snapshot_every)
            if existing is not None:
                if not publisher.holds(params, version):
                    raise WeightsError(
                        f"version {version} in {to} has other weights than {step_dir}, so another "
                        "run has published there: publish to another directory"
                    )
                yield existing
                continue
            yield publisher.publish(params, version)
    finally:
        if publisher is not None:
            publisher.close()


def _published_already(to: Path, version: int, card: ModelCard) -> Published | None:
    """The version, if it is in `to`; WeightsError if `to` is not for versions of this run."""
    strange = [path.name for path in to.glob("[!.]*") if not _is_version_name(path.name)]
    if strange:
        raise WeightsError(
            f"{to} contains {strange[0]}, which is not a published version: publish to another "
            "directory"
        )
    versions = published_versions(to)
    if versions and versions[-1] > version:
        raise WeightsError(
            f"{to} has version {versions[-1]}, and the newest step of the run is {version}: "
            "publish to another directory, or remove the versions that this run does not have"
        )
    if (identity := newest(to)) is None:
        return None
    tensors = read_manifest(to, identity.number).tensors
    if tensors != {name: source.spec for name, source in tensor_sources(card).items()}:
        raise WeightsError(f"{to} has versions of another model: publish to another directory")
    return Published(identity, 0, 0, None, None) if identity.number == version else None


def _is_version_name(name: str) -> bool:
    return name.isdecimal() and len(name) >= 8


def _newest_steps(run: Path, poll: float | None) -> Iterator[tuple[Path, ModelCard]]:
    """The newest checkpoint's directory and card, and with `poll` each newer one's."""
    seen = -1
    while True:
        step_dir, card_dir = orbax_params.find_checkpoint(run)
        if not step_dir.name.isdecimal():
            raise CheckpointError(f"{step_dir} is not a step of a run, which is a number")
        if int(step_dir.name) > seen:
            seen = int(step_dir.name)
            yield step_dir, ModelCard.load(card_dir)
        if poll is None:
            return
        time.sleep(poll)


def _refuse_incompatible(server: VllmServer, model: Architecture) -> None:
    """Raises IncompatibleServer; a server that does not answer may still come up."""
    try:
        server.examine(1, True, model)
    except IncompatibleServer:
        raise
    except ServerFailure:
        pass
    finally:
        server.close()


def _describe(published: Published, to: Path) -> str:
    if published.delta_bytes is None and published.snapshot_bytes is None:
        return f"version {published.identity.number} is already in {to}"
    parts = [f"version {published.identity.number}"]
    parts.append(f"{published.changed} of {published.elements} weights changed")
    if published.delta_bytes is not None:
        parts.append(f"delta {published.delta_bytes} bytes")
    if published.snapshot_bytes is not None:
        parts.append(f"snapshot {published.snapshot_bytes} bytes")
    return ", ".join(parts)

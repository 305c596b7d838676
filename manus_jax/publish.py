"""`python -m manus_jax.publish RUN --to DIR`: a run's checkpoints as versions for servers.

Publishes the newest checkpoint; with --follow it goes on with every new one until it is stopped.
Servers named with --server are brought to each version, and with --follow kept there: one that is
restarted gets the newest again. The key that they ask for is in VLLM_API_KEY.
"""

import argparse
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from manus_jax import command
from manus_jax.engines.protocol import EngineError
from manus_jax.models import orbax_params
from manus_jax.models.huggingface import ModelCard
from manus_jax.models.loading import load_step
from manus_jax.vllm.access import read_api_key
from manus_jax.vllm.fleet import Fleet, PoolSettings
from manus_jax.weights.manifest import Identity, published_versions
from manus_jax.weights.mirror import newest
from manus_jax.weights.publisher import Published, Publisher


def newest_steps(run: Path, poll: float | None) -> Iterator[tuple[Path, ModelCard]]:
    """The newest checkpoint's directory and card, and with `poll` seconds each newer one's."""
    seen = -1
    while True:
        step_dir, card_dir = orbax_params.find_checkpoint(run)
        if int(step_dir.name) > seen:
            seen = int(step_dir.name)
            yield step_dir, ModelCard.load(card_dir)
        if poll is None:
            return
        time.sleep(poll)


def publish_run(
    run: Path, to: Path, poll: float | None = None, snapshot_every: int = 20
) -> Iterator[Published]:
    """Publishes steps as versions of the same number; one that is there already is left alone."""
    publisher = None
    try:
        for step_dir, card in newest_steps(run, poll):
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


def serving(servers: list[str], run: Path, to: Path) -> Fleet | None:
    """The servers on their way to the newest version in `to`; None while there is none."""
    target = newest(to)
    if target is None or not servers:
        return None
    _, card_dir = orbax_params.find_checkpoint(run)
    model = ModelCard.load(card_dir).architecture
    settings = PoolSettings(api_key=read_api_key(None))
    return Fleet(
        servers, 1, to, target, model, settings, threading.Condition(), lambda member, problem: None
    )


def await_all(fleet: Fleet, target: Identity | None) -> None:
    """Until every server holds the version; EngineError for the first that cannot."""
    for member in fleet.members.values():
        while member.held != target:
            if member.state.failures_in_a_row > 2:
                raise EngineError(member.state.problem)
            time.sleep(0.05)


def describe(published: Published) -> str:
    parts = [f"version {published.identity.number}"]
    parts.append(f"{published.changed} of {published.elements} weights changed")
    if published.delta_bytes is not None:
        parts.append(f"delta {published.delta_bytes} bytes")
    if published.snapshot_bytes is not None:
        parts.append(f"snapshot {published.snapshot_bytes} bytes")
    return ", ".join(parts)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m manus_jax.publish", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--to", type=Path, required=True, help="where versions are published")
    parser.add_argument("--follow", action="store_true", help="go on with every new checkpoint")
    parser.add_argument("--poll", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument(
        "--snapshot-every", type=int, default=20, help="versions from one snapshot to the next"
    )
    parser.add_argument(
        "--server", action="append", default=[], help="a vLLM server's URL; may be repeated"
    )
    args = parser.parse_args(arguments)
    poll = args.poll if args.follow else None
    fleet = serving(args.server, args.run, args.to)
    try:
        for published in publish_run(args.run, args.to, poll, args.snapshot_every):
            print(describe(published), flush=True)
            if fleet is None:
                fleet = serving(args.server, args.run, args.to)
            else:
                fleet.update(published.identity)
        if fleet is not None:
            await_all(fleet, newest(args.to))
    finally:
        if fleet is not None:
            fleet.close()


if __name__ == "__main__":
    command.run(main, interrupted="what was published stays; the same command goes on from it")

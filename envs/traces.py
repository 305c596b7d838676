"""`python -m envs.traces NAME --n N --out F.parquet`: oracle episodes in OpenManus-RL's schema.

The one idea: a trace is the conversation that a perfect agent would have. The oracle plays through
the agent's own loop, opening, action format and client, against a server of the environment, so a
model that is trained on traces has seen, token for token, what it will meet in its rollouts. The
columns are those of OpenManus-RL.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from envs.game import EnvironmentSpec, GameError
from envs.registry import UnknownEnvironment, load
from manus_jax.agentgym.environments import open_environments
from manus_jax.agentgym.table import environment
from manus_jax.data.tasks import Task
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.baseline_players import OraclePolicy
from manus_jax.rollout.prompts import opening
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.settings import RolloutSettings
from manus_jax.rollout.trajectory import FailedEpisode, Trajectory, episode_specs
from manus_jax.servers.processes import ServerSetupError

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("item_id", pa.string()),
        (
            "conversations",
            pa.list_(
                pa.field(
                    "element",
                    pa.struct(
                        [("from", pa.string()), ("loss", pa.bool_()), ("value", pa.string())]
                    ),
                )
            ),
        ),
        (
            "prompt",
            pa.list_(
                pa.field("element", pa.struct([("content", pa.string()), ("role", pa.string())]))
            ),
        ),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [("conversations", pa.string()), ("index", pa.int64()), ("split", pa.string())]
            ),
        ),
    ]
)
ROLLOUT = RolloutSettings(max_turns=200, max_in_flight=16)


class TraceError(Exception):
    """No traces can be made as asked; the message says why."""


def shuffled_items(spec: EnvironmentSpec, split: str, seed: int) -> list[int]:
    """The items of a split in an order that depends on nothing but the seed."""
    rng = random.Random(seed)
    return [item for _, item in sorted((rng.random(), item) for item in spec.items(split))]


def rows(spec: EnvironmentSpec, split: str, n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows of different items; an item that the oracle does not win is passed over."""
    if spec.oracle is None:
        raise TraceError(f"{spec.name} has no oracle, so no traces can be made of it")
    items = shuffled_items(spec, split, seed)
    made: list[dict[str, Any]] = []
    with open_environments({spec.name: "embedded"}) as pool:
        while items and len(made) < n:
            batch, items = items[: n - len(made)], items[n - len(made) :]
            tasks = [Task(spec.name, item, f"{spec.name}_{item}") for item in batch]
            for outcome in run_episodes(episode_specs(tasks), OraclePolicy(), pool, ROLLOUT):
                if isinstance(outcome, FailedEpisode):
                    raise TraceError(f"{outcome.spec.task.item_id} was not played: {outcome.error}")
                if outcome.success:
                    made.append(row(outcome, len(made), split))
    if len(made) < n:
        raise TraceError(f"{spec.name} has {len(made)} winnable items in {split}: lower --n {n}")
    return made


def row(trajectory: Trajectory, index: int, split: str) -> dict[str, Any]:
    """An episode as a row of the table."""
    task = trajectory.task
    assert task.env is not None
    conversation = conversation_of(trajectory)
    recorded = json.dumps(conversation, ensure_ascii=False)
    action_format = format_for(environment(task.env), ROLLOUT.action_format)
    told = opening(task, action_format, ROLLOUT.prompt).before
    return {
        "data_source": task.env,
        "item_id": task.item_id,
        "conversations": conversation,
        "prompt": [{"content": message.content, "role": message.role} for message in told],
        "ability": "agent-reasoning",
        "reward_model": {"ground_truth": recorded, "style": "rule"},
        "extra_info": {"conversations": recorded, "index": index, "split": split},
    }


def conversation_of(trajectory: Trajectory) -> list[dict[str, Any]]:
    """An episode as AgentGym writes conversations; only the agent's own turns have a loss."""
    conversation = [
        _agent(message.content, loss=False)
        if message.role == "assistant"
        else _human(message.content)
        for message in trajectory.opening
    ]
    for number, turn in enumerate(trajectory.turns):
        if number:
            conversation.append(_human(trajectory.observations[number]))
        conversation.append(_agent(turn.text, loss=True))
    return conversation


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m envs.traces", description=__doc__)
    parser.add_argument("name", help="the environment, e.g. textcraft")
    parser.add_argument("--n", type=int, required=True, help="how many episodes")
    parser.add_argument("--out", type=Path, required=True, help="the parquet file to write")
    parser.add_argument("--split", default="train")
    parser.add_argument("--seed", type=int, default=0, help="which items, and in which order")
    options = parser.parse_args(arguments)
    try:
        if options.n < 1:
            raise TraceError(f"--n must be at least 1, not {options.n}")
        spec = load(options.name)
        missing = spec.requirements()
        if missing is not None:
            raise TraceError(missing)
        made = rows(spec, options.split, options.n, options.seed)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(made, schema=SCHEMA), options.out)
    except (UnknownEnvironment, GameError, TraceError, ServerSetupError, OSError) as error:
        print(f"envs.traces: {error}", file=sys.stderr)
        return 2
    print(f"wrote {len(made)} episodes of {spec.name} to {options.out}")
    return 0


def _human(value: str) -> dict[str, Any]:
    return {"from": "human", "loss": None, "value": value}


def _agent(value: str, loss: bool) -> dict[str, Any]:
    return {"from": "gpt", "loss": loss, "value": value}


if __name__ == "__main__":
    sys.exit(main())

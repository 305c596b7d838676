"""Traces: oracle episodes as conversations in OpenManus-RL's parquet schema.

The oracle uses the same episode loop, prompts, action format and client as a model, against an
environment server. Fine-tuning on traces therefore uses exactly the token format of later rollouts.
"""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from envs.game import EnvironmentSpec, GameError
from envs.registry import UnknownEnvironment, load
from manus_jax.agentgym.environments import open_environments
from manus_jax.agentgym.table import environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.data.tasks import Task
from manus_jax.errors import UserError
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.baseline_players import OraclePolicy
from manus_jax.rollout.prompts import opening
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.trajectory import FailedEpisode, Trajectory, episode_specs

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


class TraceError(UserError):
    """The requested traces cannot be produced."""


def write_traces(name: str, split: str, count: int, seed: int, path: Path) -> None:
    """Writes `count` successful oracle episodes. `seed` selects the items."""
    if count < 1:
        raise TraceError(f"--n must be at least 1, not {count}")
    try:
        spec = load(name)
        missing = spec.requirements()
        if missing is not None:
            raise TraceError(missing)
        made = rows(spec, split, count, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(made, schema=SCHEMA), path)
    except (UnknownEnvironment, GameError, OSError) as error:
        raise TraceError(str(error)) from None


def shuffled_items(spec: EnvironmentSpec, split: str, seed: int) -> list[int]:
    """The items of a split in an order that depends only on the seed."""
    rng = random.Random(seed)
    return [item for _, item in sorted((rng.random(), item) for item in spec.items(split))]


def rows(spec: EnvironmentSpec, split: str, n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows of distinct items; items that the oracle does not solve are skipped."""
    if spec.oracle is None:
        raise TraceError(f"{spec.name} has no oracle to play the traces")
    items = shuffled_items(spec, split, seed)
    if n > len(items):
        raise TraceError(f"{spec.name} has {len(items)} items in {split}, not {n}")
    made: list[dict[str, Any]] = []
    with open_environments({spec.name: "embedded"}) as pool:
        while items and len(made) < n:
            batch, items = items[: n - len(made)], items[n - len(made) :]
            tasks = [Task(spec.name, item, f"{spec.name}_{item}") for item in batch]
            for outcome in run_episodes(episode_specs(tasks), OraclePolicy(), pool, ROLLOUT):
                if isinstance(outcome, FailedEpisode):
                    raise TraceError(f"{outcome.spec.task.item_id} failed: {outcome.error}")
                if outcome.success:
                    made.append(row(outcome, len(made), split))
    if len(made) < n:
        raise TraceError(f"{spec.name} has only {len(made)} winnable items in {split}, not {n}")
    return made


def row(trajectory: Trajectory, index: int, split: str) -> dict[str, Any]:
    """An episode as a row in OpenManus-RL's schema."""
    task = trajectory.task
    assert task.env is not None
    conversation = conversation_of(trajectory)
    recorded = json.dumps(conversation, ensure_ascii=False)
    action_format = format_for(environment(task.env), ROLLOUT.action_format)
    told = opening(task, action_format, ROLLOUT).before
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
    """An episode in AgentGym's conversation format, with loss on the agent's turns only."""
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


def _human(value: str) -> dict[str, Any]:
    return {"from": "human", "loss": None, "value": value}


def _agent(value: str, loss: bool) -> dict[str, Any]:
    return {"from": "gpt", "loss": loss, "value": value}

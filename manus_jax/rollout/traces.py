"""Traces: oracle episodes as conversations in OpenManus-RL's parquet schema.

The oracle uses the same episode loop, prompts, action format and client as a model, against an
environment server. Fine-tuning on traces therefore uses exactly the token format of later rollouts.
"""

import json
import random
import tempfile
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

_TEXT = pa.string()


def _list_of(fields: dict[str, pa.DataType]) -> pa.DataType:
    return pa.list_(pa.field("element", pa.struct(fields)))


SCHEMA = pa.schema(
    {
        "data_source": _TEXT,
        "item_id": _TEXT,
        "conversations": _list_of({"from": _TEXT, "loss": pa.bool_(), "value": _TEXT}),
        "prompt": _list_of({"content": _TEXT, "role": _TEXT}),
        "ability": _TEXT,
        "reward_model": pa.struct({"ground_truth": _TEXT, "style": _TEXT}),
        "extra_info": pa.struct({"conversations": _TEXT, "index": pa.int64(), "split": _TEXT}),
    }
)
ROLLOUT = RolloutSettings(max_turns=200, max_in_flight=16)


class TraceError(UserError):
    """The requested traces cannot be produced."""


def write_traces(name: str, split: str, count: int, seed: int, path: Path) -> None:
    """Writes `count` successful oracle episodes. `seed` selects the items."""
    try:
        spec = load(name)
        missing = spec.requirements()
        if missing is not None:
            raise TraceError(missing)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as work:
            made = rows(spec, split, count, seed)
            file = Path(work) / path.name
            table = pa.Table.from_pylist(made, schema=SCHEMA)
            pq.write_table(table, file, write_page_checksum=True)
            file.replace(path)
    except (UnknownEnvironment, GameError, OSError) as error:
        raise TraceError(str(error)) from None


def rows(spec: EnvironmentSpec, split: str, n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows of distinct items; items that the oracle does not solve are skipped."""
    if spec.oracle is None:
        raise TraceError(f"{spec.name} has no oracle to play the traces")
    # Of the generator's methods, only random() is stable across Python versions.
    rng = random.Random(seed)
    items = [item for _, item in sorted((rng.random(), item) for item in spec.items(split))]
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
    prompt = opening(task, action_format, ROLLOUT).before
    return {
        "data_source": task.env,
        "item_id": task.item_id,
        "conversations": conversation,
        "prompt": [{"content": message.content, "role": message.role} for message in prompt],
        "ability": "agent-reasoning",
        "reward_model": {"ground_truth": recorded, "style": "rule"},
        "extra_info": {"conversations": recorded, "index": index, "split": split},
    }


def conversation_of(trajectory: Trajectory) -> list[dict[str, Any]]:
    """An episode in AgentGym's conversation format, with loss on the agent's turns only."""
    conversation = [
        {"from": "gpt", "loss": False, "value": message.content}
        if message.role == "assistant"
        else {"from": "human", "loss": None, "value": message.content}
        for message in trajectory.opening
    ]
    for number, turn in enumerate(trajectory.turns):
        if number:
            seen = trajectory.observations[number]
            conversation.append({"from": "human", "loss": None, "value": seen})
        conversation.append({"from": "gpt", "loss": True, "value": turn.text})
    return conversation

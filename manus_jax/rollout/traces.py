"""Traces: episodes as conversations in OpenManus-RL's parquet schema.

The oracle or another policy uses the same episode loop, prompts, action format and client as a
trained model, against an environment server. Fine-tuning on traces therefore uses exactly the token
format of later rollouts.
"""

import dataclasses
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from envs.game import EnvironmentSpec, GameError
from envs.registry import UnknownEnvironment, load
from manus_jax.agentgym.environments import open_environments, register_adapted
from manus_jax.agentgym.table import environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.data.tasks import Task
from manus_jax.data.tool_calls import ToolCall, parse_tool_calls
from manus_jax.errors import UserError
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.api_player import PREFIX, ApiPolicy
from manus_jax.rollout.baseline_players import OraclePolicy, RandomPolicy
from manus_jax.rollout.player import Agent
from manus_jax.rollout.prompts import opening
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.trajectory import FailedEpisode, Trajectory, episode_specs, trajectories
from manus_jax.servers.chat_api import ChatApi

_FAILED_IN_A_ROW = 10
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


@dataclasses.dataclass(frozen=True)
class Selection:
    """Who plays, how often each item, and which episodes are kept: the best one of each item, if it
    is a success or, with `min_reward`, has at least that reward."""

    policy: str = "oracle"
    attempts: int = 1
    min_reward: float | None = None

    @property
    def external(self) -> bool:
        """Whether a model behind an API plays."""
        return self.policy.startswith(PREFIX)

    def agent(self, spec: EnvironmentSpec, seed: int) -> Agent:
        if self.policy == "oracle":
            if spec.oracle is None:
                raise TraceError(f"{spec.name} has no oracle to play the traces")
            return OraclePolicy()
        if self.policy == "random":
            return RandomPolicy(seed)
        if self.external:
            try:
                return ApiPolicy(ChatApi.parse(self.policy.removeprefix(PREFIX)), seed)
            except ValueError as error:
                raise TraceError(f"--policy {error}") from None
        raise TraceError(
            f"--policy {self.policy!r} is neither oracle nor random nor openai:MODEL@URL; "
            "`python -m manus_jax.serve` makes a model available under such an address"
        )

    @property
    def rollout(self) -> RolloutSettings:
        """How an item is played: once, or several times, of which the best is kept."""
        if self.attempts == 1:
            return ROLLOUT
        attempts = {"n": self.attempts}
        return dataclasses.replace(ROLLOUT, strategy="best_of_n", strategy_parameters=attempts)

    def keeps(self, episode: Trajectory) -> bool:
        if self.min_reward is None:
            return episode.success
        return episode.env_reward >= self.min_reward


ORACLE = Selection()


def write_traces(
    name: str, split: str, count: int, seed: int, path: Path, selection: Selection = ORACLE
) -> None:
    """Writes `count` episodes of distinct items. `seed` selects the items."""
    try:
        register_adapted(name)
        spec = load(name)
        missing = spec.requirements()
        if missing is not None:
            raise TraceError(missing)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as work:
            made = rows(spec, split, count, seed, selection)
            file = Path(work) / path.name
            table = pa.Table.from_pylist(made, schema=SCHEMA)
            pq.write_table(table, file, write_page_checksum=True)
            file.replace(path)
    except (UnknownEnvironment, GameError, OSError) as error:
        raise TraceError(str(error)) from None


def rows(
    spec: EnvironmentSpec, split: str, n: int, seed: int, selection: Selection = ORACLE
) -> list[dict[str, Any]]:
    """`n` rows of distinct items; items without an episode to keep are skipped.

    Failed episodes are an error. Those of a policy behind an API are skipped as well, because the
    others were expensive, unless so many in a row fail that it seems to be down.
    """
    agent = selection.agent(spec, seed)
    # Of the generator's methods, only random() is stable across Python versions.
    rng = random.Random(seed)
    items = [item for _, item in sorted((rng.random(), item) for item in spec.items(split))]
    if n > len(items):
        raise TraceError(f"{spec.name} has {len(items)} items in {split}, not {n}")
    if isinstance(agent, ApiPolicy):
        agent.check(spec.name, selection.rollout)
        agent.require_answer()
    made: list[dict[str, Any]] = []
    in_a_row = 0
    with open_environments({spec.name: "embedded"}) as pool:
        while items and len(made) < n:
            batch, items = items[: n - len(made)], items[n - len(made) :]
            tasks = [Task(spec.name, item, f"{spec.name}_{item}") for item in batch]
            outcomes = run_episodes(episode_specs(tasks), agent, pool, selection.rollout)
            failed = [outcome for outcome in outcomes if isinstance(outcome, FailedEpisode)]
            in_a_row = in_a_row + len(failed) if len(failed) == len(outcomes) else 0
            if failed and (not selection.external or in_a_row >= min(n, _FAILED_IN_A_ROW)):
                raise TraceError(f"{failed[0].spec.task.item_id} failed: {failed[0].error}")
            for episode in trajectories(outcomes):
                if selection.keeps(episode):
                    made.append(row(episode, len(made), split))
    if len(made) < n:
        raise TraceError(
            f"{selection.policy} played {len(made)} episodes worth keeping in all items of "
            f"{split} of {spec.name}, not {n}"
        )
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


def conversation_of(trajectory: Trajectory, calls_tools: bool = False) -> list[dict[str, Any]]:
    """An episode in AgentGym's conversation format, with loss on the agent's turns only.

    If its actions are tool calls, turns have `tool_calls`, and replies to them are from "tool".
    """
    conversation = [
        {"from": "gpt", "loss": False, "value": message.content, **_calls(message.tool_calls)}
        if message.role == "assistant"
        else {"from": "human", "loss": None, "value": message.content}
        for message in trajectory.opening
    ]
    for number, turn in enumerate(trajectory.turns):
        if number:
            replied = calls_tools and trajectory.turns[number - 1].valid
            seen = trajectory.observations[number]
            who = "tool" if replied else "human"
            conversation.append({"from": who, "loss": None, "value": seen})
        text, calls = parse_tool_calls(turn.text) if calls_tools and turn.valid else (turn.text, ())
        conversation.append({"from": "gpt", "loss": True, "value": text, **_calls(calls)})
    return conversation


def _calls(calls: Sequence[ToolCall]) -> dict[str, Any]:
    return {"tool_calls": [call.record() for call in calls]} if calls else {}

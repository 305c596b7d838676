"""Trajectory files: one JSON object per episode and line, one file per step, text and exact ids.

Derived data is not written. A turn is a span of a segment, so masks, turn ids and the padding of
log-probs are reconstructed from the spans when a file is read. Advantages are not part of a
trajectory, because they depend on the other episodes of the step; they are stored next to the
log-probs of each turn.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manus_jax.data.chat import Message
from manus_jax.data.tasks import Task
from manus_jax.rewards import Score
from manus_jax.rollout.trajectory import (
    EpisodeSpec,
    FailedEpisode,
    Outcome,
    Segment,
    Trajectory,
    Turn,
)

_TASK_FIELDS = ("env", "item", "item_id", "ground_truth", "data_source")
_SCALARS = (
    "env_reward",
    "success",
    "end_reason",
    "attempts",
    "prompts_extended",
    "prompts_forked",
    "first_observation",
)


_BROKEN = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,  # a token id beyond 32 bits
    RecursionError,  # deeply nested JSON
)


@dataclasses.dataclass(frozen=True, eq=False)
class LoggedEpisode:
    """One line of a trajectory file."""

    outcome: Outcome
    advantages: tuple[np.ndarray, ...] | None
    """Per segment, float32 [T], 0 outside the mask; None if the episode was not trained on."""


def write_trajectories(
    directory: str | os.PathLike[str],
    name: int | str,
    outcomes: Sequence[Outcome],
    advantages: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> Path:
    """Writes `directory/<name>.jsonl` atomically and returns its path.

    During training, `name` is the step, and `advantages` maps the uid of each episode that is
    trained on to one array [T] per segment.

    Tasks are stored with their identifiers and ground truth, without reference conversations.
    """
    path = Path(directory) / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with work.open("w", encoding="utf-8") as file:
        for outcome in outcomes:
            learned = (advantages or {}).get(outcome.spec.uid)
            record = json.dumps(episode_record(outcome, learned), ensure_ascii=False, default=str)
            # Lone surrogates in a model's text cannot be encoded as UTF-8.
            file.write(record.encode("utf-8", "replace").decode("utf-8") + "\n")
    work.replace(path)
    return path


def read_trajectories(path: str | os.PathLike[str]) -> Iterator[Outcome]:
    """The outcomes in a file, in order; ValueError names a line that cannot be parsed."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield parse_episode(line).outcome
            except ValueError as error:
                raise ValueError(f"{path} line {number} is no trajectory: {error}") from error


def parse_episode(line: str | bytes) -> LoggedEpisode:
    """Parses one line of a file; raises ValueError if it is not an episode."""
    try:
        record = json.loads(line)
        spans = [turn.pop("advantages", None) for turn in record.get("turns", ())]
        outcome = _outcome(record)
        if isinstance(outcome, FailedEpisode) or not spans or None in spans:
            return LoggedEpisode(outcome, None)
        return LoggedEpisode(outcome, _by_segment(outcome, spans))
    except _BROKEN as error:
        raise ValueError(repr(error)) from error


def episode_record(
    outcome: Outcome, advantages: Sequence[np.ndarray] | None = None
) -> dict[str, Any]:
    """One line of a trajectory file, which `parse_episode` reads."""
    spec = outcome.spec
    task = {name: getattr(spec.task, name) for name in _TASK_FIELDS}
    common = {"uid": spec.uid, "group_id": spec.group_id, "task": task}
    if isinstance(outcome, FailedEpisode):
        failure = {"kind": outcome.kind, "error": outcome.error, "attempts": outcome.attempts}
        return {**common, "failed": failure}
    return {
        **common,
        "episode_reward": outcome.episode_reward,
        **{name: getattr(outcome, name) for name in _SCALARS},
        "score": None if outcome.score is None else dataclasses.asdict(outcome.score),
        "opening": [[message.role, message.content] for message in outcome.opening],
        "turns": [_turn_record(turn, outcome.segments, advantages) for turn in outcome.turns],
        "segments": [segment.token_ids.tolist() for segment in outcome.segments],
    }


def _turn_record(
    turn: Turn, segments: Sequence[Segment], advantages: Sequence[np.ndarray] | None
) -> dict[str, Any]:
    record = dataclasses.asdict(turn)
    if segments:
        span = slice(turn.start, turn.stop)
        record["log_probs"] = _shortest(segments[turn.segment].log_probs[span])
        record["versions"] = segments[turn.segment].versions[span].tolist()
        if advantages is not None:
            record["advantages"] = _shortest(advantages[turn.segment][span])
    return record


def _shortest(values: np.ndarray) -> list[float]:
    """float32 [n] as the shortest decimals that round-trip to the same float32."""
    return [float(str(x)) for x in values]


def _by_segment(trajectory: Trajectory, spans: Sequence[Sequence[float]]) -> tuple[np.ndarray, ...]:
    """Scatters the values of each turn's tokens to their segment positions; 0 elsewhere."""
    placed = tuple(np.zeros(len(segment), np.float32) for segment in trajectory.segments)
    for turn, values in zip(trajectory.turns, spans, strict=True):
        placed[turn.segment][turn.start : turn.stop] = values
    return placed


def _outcome(record: dict[str, Any]) -> Outcome:
    spec = EpisodeSpec(Task(**record["task"]), record["uid"], record["group_id"])
    if "failed" in record:
        return FailedEpisode(spec, **record["failed"])
    spans = [(turn.pop("log_probs", []), turn.pop("versions", [])) for turn in record["turns"]]
    turns = tuple(Turn(**turn) for turn in record["turns"])
    segments = tuple(_segment(i, ids, turns, spans) for i, ids in enumerate(record["segments"]))
    score = record["score"]
    if score is not None:
        per_turn = score["turn_scores"]
        per_turn = None if per_turn is None else tuple(per_turn)
        score = Score(score["total"], score["components"], per_turn)
    return Trajectory(
        spec=spec,
        opening=tuple(Message(role, content) for role, content in record["opening"]),
        turns=turns,
        segments=segments,
        score=score,
        **{name: record[name] for name in _SCALARS},
    )


def _segment(
    index: int,
    ids: list[int],
    turns: Sequence[Turn],
    spans: Sequence[tuple[list[float], list[int]]],
) -> Segment:
    log_probs = np.zeros(len(ids), np.float32)
    versions, turn_ids = np.full((2, len(ids)), -1, np.int32)
    for number, (turn, (probs, made_by)) in enumerate(zip(turns, spans, strict=True)):
        if turn.segment == index:
            span = slice(turn.start, turn.stop)
            log_probs[span], versions[span], turn_ids[span] = probs, made_by, number
    return Segment(np.array(ids, np.int32), turn_ids >= 0, log_probs, versions, turn_ids)

"""Trajectory files: one JSON object per episode and line, one file per step, text and exact ids.

Derived data is not written. A turn is a span of a segment, so masks, turn ids and the padding of
log-probs are reconstructed from the spans when a file is read. Advantages are not part of a
trajectory, because they depend on the other episodes of the step; they are stored next to the
log-probs of each turn. The last field of a line is a checksum of the others. It covers their
values, so that a tool that writes the JSON differently does not invalidate it.
"""

import dataclasses
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manus_jax.data.chat import Message
from manus_jax.data.tasks import Task
from manus_jax.files import open_file
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
_BRANCH = ("parent", "branch_turn")
_CHECKSUM = "checksum"

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
    with work.open("wb") as file:
        for outcome in outcomes:
            learned = (advantages or {}).get(outcome.spec.uid)
            record = _encoded(episode_record(outcome, learned))
            file.write(record[:-1] + f', "{_CHECKSUM}": "{zlib.crc32(record):08x}"}}\n'.encode())
    work.replace(path)
    return path


def _encoded(record: dict[str, Any]) -> bytes:
    # Lone surrogates in a model's text cannot be encoded as UTF-8.
    return json.dumps(record, ensure_ascii=False, default=str).encode("utf-8", "replace")


def read_trajectories(path: str | os.PathLike[str]) -> Iterator[Outcome]:
    """The outcomes in a file, in order; ValueError names a line that cannot be parsed, or whose
    content does not match its checksum."""
    with open_file(Path(path)) as file:
        for number, line in enumerate(file, start=1):
            try:
                record = _parsed(line)
                _verify(record)
                yield _episode(record).outcome
            except ValueError as error:
                raise ValueError(f"{path} line {number} is not a trajectory: {error}") from error


def parse_episode(line: str | bytes) -> LoggedEpisode:
    """Parses one line of a file, damaged or not; raises ValueError if it is not an episode."""
    return _episode(_parsed(line))


def _parsed(line: str | bytes) -> dict[str, Any]:
    try:
        record = json.loads(line if isinstance(line, str) else line.decode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError(repr(error)) from error
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    return record


def _verify(record: dict[str, Any]) -> None:
    """Raises ValueError if a record has a checksum that is not its own, and removes it."""
    expected = record.pop(_CHECKSUM, None)
    if expected is not None and expected != f"{zlib.crc32(_encoded(record)):08x}":
        raise ValueError(f"it does not match its checksum; if it was edited, remove {_CHECKSUM!r}")


def _episode(record: dict[str, Any]) -> LoggedEpisode:
    try:
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
        "opening": [[message.role, message.text] for message in outcome.opening],
        "turns": [_turn_record(turn, outcome.segments, advantages) for turn in outcome.turns],
        "segments": [segment.token_ids.tolist() for segment in outcome.segments],
        **({name: getattr(outcome, name) for name in _BRANCH} if outcome.parent else {}),
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
        **{name: record[name] for name in _BRANCH if name in record},
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
            size = turn.stop - turn.start
            if turn.start < 0 or turn.stop > len(ids) or (len(probs), len(made_by)) != (size, size):
                raise ValueError(f"the tokens of turn {number} are not those of a segment")
            log_probs[span], versions[span] = probs, _integers(made_by)
            turn_ids[span] = np.where(versions[span] >= 0, number, -1)  # -1: forced, not sampled
    return Segment(_integers(ids), turn_ids >= 0, log_probs, versions, turn_ids)


def _integers(values: Sequence[int]) -> np.ndarray:
    """int32 [n]; unlike NumPy, refuses other numbers and text instead of converting them."""
    if not all(type(value) is int for value in values):
        raise ValueError("token ids and versions are whole numbers")
    return np.array(values, np.int32)

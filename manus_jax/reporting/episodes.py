"""Selection of episodes for the report's episode browser.

A run has far more episodes than a page can hold. The selection takes the first, the last and some
intermediate trajectory files, and from each file successful and failed episodes of every
environment up to a size limit. Omitted files and episodes are counted, so that the page can say so.
"""

import collections
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer

from manus_jax.reporting.run_data import lines_of
from manus_jax.rollout.trajectory import FailedEpisode, Trajectory, Turn
from manus_jax.rollout.trajectory_files import LoggedEpisode, parse_episode

TRAIN_FILES, VALIDATION_FILES, LAST_FILES = 9, 5, 3
CANDIDATES = 64  # lines parsed per file
EPISODES_PER_FILE = 24
CHARACTERS = 8_000_000  # of JSON for all episodes together
TEXT_CHARACTERS = 4_000  # per observation or message
TURN_TOKENS = 2_000
T = TypeVar("T")


def browser_data(run: Path, characters: int = CHARACTERS) -> dict[str, Any]:
    """The selected files in order of their steps, the total number of files, and problems."""
    training, validation = _files(run / "trajectories")
    chosen = evenly_spaced(training, TRAIN_FILES)
    chosen += evenly_spaced(validation, VALIDATION_FILES)
    chosen.sort(key=lambda numbered: numbered[0])
    problems: list[str] = []
    texts = TokenTexts.of_model(run / "model", problems) if chosen else None
    shown: list[dict[str, Any]] = []
    left = characters
    for index, (step, path) in enumerate(chosen):
        try:
            file = _file(step, path, texts, left // (len(chosen) - index))
        except OSError as error:
            problems.append(f"{path.name} cannot be read: {error}")
            continue
        left -= file.pop("characters")
        shown.append(file)
        if file["unreadable"]:
            problems.append(f"{file['unreadable']} episodes of {path.name} could not be parsed")
    total = len(training) + len(validation)
    return {"files": shown, "total_files": total, "problems": problems}


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """At most `count` items: the last LAST_FILES, and others evenly spaced from the first."""
    if len(items) <= count:
        return list(items)
    rest = len(items) - LAST_FILES
    others = count - LAST_FILES
    return [items[i * rest // others] for i in range(others)] + list(items[rest:])


def _files(folder: Path) -> tuple[list[tuple[int, Path]], list[tuple[int, Path]]]:
    """(step, path) of the training files and of the validation files, in order."""
    training: list[tuple[int, Path]] = []
    validation: list[tuple[int, Path]] = []
    for path in folder.glob("*.jsonl"):
        match = re.fullmatch(r"(val_)?([0-9]{1,15})", path.stem)
        if match and path.is_file():
            (validation if match[1] else training).append((int(match[2]), path))
    return sorted(training), sorted(validation)


def _file(step: int, path: Path, texts: "TokenTexts | None", characters: int) -> dict[str, Any]:
    total = sum(1 for _ in lines_of(path))
    count = min(total, CANDIDATES)
    chosen = {i * total // count for i in range(count)}
    candidates, unreadable = [], 0
    for number, line in enumerate(lines_of(path)):
        if number in chosen:
            try:
                with np.errstate(over="ignore"):  # a damaged number can exceed float32
                    candidates.append((number, parse_episode(line)))
            except Exception:  # a damaged line can be wrong in any way
                unreadable += 1
    episodes, used = [], 0
    for number, logged in _interleaved(candidates):
        try:
            record = _record(logged, texts) | {"number": number}
        except Exception:  # as above
            unreadable += 1
            continue
        size = len(json.dumps(record))
        if used + size <= characters:
            used += size
            episodes.append(record)
        if len(episodes) == EPISODES_PER_FILE:
            break
    return {
        "step": step,
        "validation": path.stem.startswith("val_"),
        "total": total,
        "unreadable": unreadable,
        "episodes": sorted(episodes, key=lambda record: record["number"]),
        "characters": used,
    }


def _interleaved(
    candidates: Sequence[tuple[int, LoggedEpisode]],
) -> list[tuple[int, LoggedEpisode]]:
    """Alternates between kinds: successes, losses and failures of each environment."""
    kinds: dict[Any, list[tuple[int, LoggedEpisode]]] = collections.defaultdict(list)
    for numbered in candidates:
        outcome = numbered[1].outcome
        won = bool(outcome.success) if isinstance(outcome, Trajectory) else None
        kinds[str(outcome.spec.task.env), won].append(numbered)
    longest = max(map(len, kinds.values()), default=0)
    return [kind[i] for i in range(longest) for kind in kinds.values() if i < len(kind)]


def _record(logged: LoggedEpisode, texts: "TokenTexts | None") -> dict[str, Any]:
    outcome = logged.outcome
    task = outcome.spec.task
    names = {"id": task.item_id, "uid": outcome.spec.uid, "env": task.env or ""}
    record: dict[str, Any] = {key: shortened(str(name)) for key, name in names.items()}
    if isinstance(outcome, FailedEpisode):
        failed = {"kind": str(outcome.kind), "error": shortened(outcome.error)}
        return record | {"failed": failed, "attempts": outcome.attempts}
    turns = [
        _turn_record(turn, outcome, logged.advantages, number, texts)
        for number, turn in enumerate(outcome.turns)
    ]
    return record | {
        "won": bool(outcome.success),
        "reward": _short(outcome.episode_reward),
        "env_reward": _short(outcome.env_reward),
        "parts": {k: _short(v) for k, v in outcome.score.components.items()}
        if outcome.score
        else {},
        "end": str(outcome.end_reason),
        "attempts": outcome.attempts,
        "opening": [[str(m.role), shortened(m.content)] for m in outcome.opening],
        "first": shortened(outcome.first_observation),
        "turns": turns,
    }


def _turn_record(
    turn: Turn,
    trajectory: Trajectory,
    advantages: Sequence[np.ndarray] | None,
    number: int,
    texts: "TokenTexts | None",
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": shortened(turn.text),
        "action": None if turn.action is None else shortened(turn.action),
        "observation": shortened(turn.observation),
        "reward": _short(trajectory.turn_rewards[number]),
        "cut": bool(turn.cut),
        "seconds": [round(turn.generation_seconds, 2), round(turn.environment_seconds, 2)],
    }
    if texts is None or not trajectory.segments:
        return record
    segment = trajectory.segments[turn.segment]
    span = slice(turn.start, min(turn.stop, turn.start + TURN_TOKENS))
    ids = segment.token_ids[span].tolist()
    record |= {
        "tokens": texts(ids),
        "ids": ids,
        "log_probs": [round(float(x), 3) for x in segment.log_probs[span]],
        "more_tokens": turn.stop - span.stop,
    }
    if advantages is not None:
        record["advantages"] = [_short(x) for x in advantages[turn.segment][span]]
    return record


def shortened(text: str, limit: int = TEXT_CHARACTERS) -> str:
    """Removes the middle of a text that is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    head = limit * 3 // 4
    tail = limit - head
    return f"{text[:head]}\n[… {len(text) - limit:,} characters …]\n{text[-tail:]}"


def _short(value: float) -> float:
    return float(f"{float(value):.4g}")


class TokenTexts:
    """The text of each token; a character of several tokens is assigned to the last one."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._size = tokenizer.get_vocab_size()

    @classmethod
    def of_model(cls, directory: Path, problems: list[str]) -> "TokenTexts | None":
        """None if the run has no usable tokenizer; turns then have no text per token."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises no narrower class
            problems.append(f"model/tokenizer.json is damaged, so no tokens are shown: {error}")
            return None

    def __call__(self, ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        pending: list[int] = []
        for place, token in enumerate(ids):
            if not 0 <= token < self._size:
                texts.append(f"<{token}>")  # not in the vocabulary
                pending = []
                continue
            pending.append(token)
            text = self._tokenizer.decode(pending, skip_special_tokens=False)
            # A UTF-8 character has at most four bytes.
            unfinished = text.endswith("\ufffd") and len(pending) < 4 and place + 1 < len(ids)
            texts.append("" if unfinished else text)
            if not unfinished:
                pending = []
        return texts

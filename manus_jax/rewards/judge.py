"""A reward given by another model, which reads the episode and a rubric.

    algorithm.reward = "judge"
    algorithm.reward_parameters = {"model": "MODEL@http://HOST:8000/v1", "rubric": "rubric.txt"}

The judge is asked for a line "Score: N" with N from 0 to `scale`; the reward is N / `scale`. Equal
episodes are judged once. An episode without a score, after all attempts, is dropped.
"""

import functools
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from manus_jax.files import read_text
from manus_jax.limits import Range
from manus_jax.rewards.registry import (
    REWARDS,
    EpisodeTurn,
    RewardError,
    RewardUnavailable,
    Score,
    needs_service,
    try_early,
)
from manus_jax.servers.chat_api import ChatApi, ChatApiError

_SCORE = re.compile(r"score\W{0,5}(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_MAX_CACHED = 100_000
_cache: dict[tuple[str, str, str, int], "Future[float]"] = {}
_lock = threading.Lock()


def _require_answer(model: str, **parameters: Any) -> None:
    try:
        _api(model).require_answer()
    except ChatApiError as error:
        raise RewardError(f"reward function 'judge': {error}") from None


@REWARDS.register("judge")
@try_early
@needs_service(_require_answer)
def judge(
    solution_str: str,
    ground_truth: Any,
    *,
    turns: Sequence[EpisodeTurn],
    first_observation: str,
    item_id: str,
    env_reward: float,
    model: str,
    rubric: str,
    scale: float = 10.0,
    env_weight: float = 0.0,
    max_tokens: int = 512,
    **facts: Any,
) -> Score:
    """The judge's score from 0 to 1, plus `env_weight` times the environment's reward.

    `model` is MODEL@URL, and `rubric` a file with the criteria.
    """
    if scale <= 0:
        raise RewardError(f"reward function 'judge': scale = {scale} must be above 0")
    if problem := Range(at_least=1, at_most=2**22).problem(max_tokens):
        raise RewardError(f"reward function 'judge': max_tokens = {max_tokens} {problem}")
    api, criteria = _api(model), _read(rubric)
    if not turns:  # there is nothing to judge
        return Score(env_weight * env_reward)
    prompt = _prompt(criteria, item_id, first_observation, turns, scale)
    points = _points(api, prompt, scale, max_tokens)
    parts = {"judge": points / scale, "env": env_weight * env_reward}
    return Score(parts["judge"] + parts["env"], parts)


def _points(api: ChatApi, prompt: str, scale: float, max_tokens: int) -> float:
    """The points for a prompt; equal ones share a call, also while it is under way."""
    key = (api.model, api.url, prompt, max_tokens)
    with _lock:
        points = _cache.get(key)
        first = points is None
        if points is None:
            if len(_cache) >= _MAX_CACHED:
                _cache.clear()
            points = _cache[key] = Future()
    if first:
        try:
            points.set_result(_ask(api, prompt, scale, max_tokens))
        except BaseException as error:
            with _lock:
                _cache.pop(key, None)  # the next episode like it is judged again
            points.set_exception(error)
    return points.result()


def _prompt(
    rubric: str,
    item_id: str,
    first_observation: str,
    turns: Sequence[EpisodeTurn],
    scale: float,
) -> str:
    played = "\n\n".join(
        f"Agent:\n{turn.text}\n\nEnvironment:\n{turn.observation}" for turn in turns
    )
    return (
        f"{rubric}\n\nThe agent's episode of task {item_id}:\n\n"
        f"Environment:\n{first_observation}\n\n{played}\n\n"
        f"Judge the episode by the criteria above. End your answer with a line "
        f'"Score: N", where N is a number from 0 to {scale:g}.'
    )


def _ask(api: ChatApi, prompt: str, scale: float, max_tokens: int) -> float:
    """The points that the judge gives; an answer without points is asked for once more."""
    answer = ""
    for temperature in (0.0, 1.0):
        try:
            answer = api.complete(
                [{"role": "user", "content": prompt}],
                temperature=temperature,
                max_tokens=max_tokens,
            ).text
        except ChatApiError as error:
            raise RewardUnavailable(f"the judge failed: {error}") from None
        found = _SCORE.findall(answer)
        if found and 0 <= float(found[-1]) <= scale:
            return float(found[-1])
    raise RewardUnavailable(f"the judge gave no score from 0 to {scale:g}: {answer[-100:]!r}")


@functools.cache
def _read(rubric: str) -> str:
    try:
        criteria = read_text(Path(rubric).expanduser()).strip()
    except (OSError, ValueError, RuntimeError) as error:
        raise RewardError(f"reward function 'judge': the rubric cannot be read: {error}") from None
    if not criteria:
        raise RewardError(f"reward function 'judge': the rubric {rubric} is empty")
    return criteria


@functools.cache
def _api(model: str) -> ChatApi:
    try:
        api = ChatApi.parse(model)
        api.head()
        return api
    except (ValueError, ChatApiError) as error:
        raise RewardError(f"reward function 'judge': model {error}") from None

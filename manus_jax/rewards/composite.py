"""The environment's own reward, and weighted sums of rewards.

The components of a sum are reported after weighting, so that they sum to the total.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from manus_jax.rewards.ground_truth import action_similarity
from manus_jax.rewards.registry import (
    REWARDS,
    EpisodeTurn,
    RewardError,
    RewardSettings,
    Score,
    compute,
    needs_service,
    try_early,
)
from manus_jax.rewards.text import tag_format, thought_length


@REWARDS.register("env")
@try_early
def env(
    solution_str: str,
    ground_truth: Any,
    *,
    turns: Sequence[EpisodeTurn],
    env_reward: float,
    scale: float = 1.0,
    clip: float | None = None,
    **facts: Any,
) -> Score:
    """The environment's episode reward, multiplied by `scale` and clipped to ±`clip`.

    The share of a turn is the increase of the reward in that turn.
    """
    if clip is not None and clip < 0:
        raise ValueError(f"clip = {clip} must not be negative")
    total = scale * env_reward
    if clip is not None:
        total = min(max(total, -clip), clip)
    return Score(total, {"env": total}, tuple(scale * turn.reward for turn in turns))


@REWARDS.register("goal")
@try_early
def goal(
    solution_str: str,
    ground_truth: Any,
    *,
    env_reward: float,
    success: bool,
    finish_reason: str,
    won: float = 1.0,
    lost: float = -1.0,
    **facts: Any,
) -> float:
    """`won` for a success, `lost` if the environment ended the episode without a reward.

    Otherwise (partial credit, or a truncated episode) the environment's reward.
    """
    if success:
        return won
    return lost if finish_reason == "done" and env_reward <= 0 else env_reward


def _check_parts(
    weights: Mapping[str, float], parameters: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    for name in weights:
        RewardSettings(name, (parameters or {}).get(name, {})).check_service()


@REWARDS.register("weighted")
@try_early
@needs_service(_check_parts)
def weighted(
    solution_str: str,
    ground_truth: Any,
    *,
    turns: Sequence[EpisodeTurn],
    weights: Mapping[str, float],
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
    **facts: Any,
) -> Score:
    """The weighted sum of the reward functions in `weights`.

    `parameters` sets constants per function, e.g. {"length_penalty": {"max_length": 200}}.
    """
    constants = parameters or {}
    if unused := sorted(set(constants) - set(weights)):
        raise RewardError(f"'weighted' has parameters for {unused[0]!r}, which has no weight")
    parts: dict[str, float] = {}
    shares: list[float] | None = None
    for name, weight in weights.items():
        settings = RewardSettings(name, constants.get(name, {}))
        score = compute(
            settings, str(facts.get("item_id")), solution_str, ground_truth, turns, **facts
        )
        parts[name] = weight * score.total
        if score.turn_scores is not None:
            before = shares or [0.0] * len(turns)
            shares = [x + weight * y for x, y in zip(before, score.turn_scores, strict=True)]
    return Score(sum(parts.values()), parts, None if shares is None else tuple(shares))


@REWARDS.register("agentgym")
@try_early
def agentgym(
    solution_str: str,
    ground_truth: Any,
    *,
    turns: Sequence[EpisodeTurn],
    env_reward: float,
    env_weight: float = 0.25,
    format_weight: float = 0.25,
    length_weight: float = 0.15,
    actions_weight: float = 0.35,
    env_scale: float = 1.0,
    env_clip: float = 5.0,
    format_mode: str = "full",
    format_maximum: float = 1.0,
    format_minimum: float = -0.5,
    length_target: int = 50,
    length_tolerance: float = 0.3,
    length_maximum: float = 0.5,
    length_minimum: float = -0.25,
    actions_maximum: float = 1.0,
    actions_minimum: float = 0.0,
    **facts: Any,
) -> Score:
    """OpenManus-RL's composite of environment, format, thought length and reference actions."""
    common = (solution_str, ground_truth)
    from_env = env(*common, turns=turns, env_reward=env_reward, scale=env_scale, clip=env_clip)
    parts = {
        "env": env_weight * from_env.total,
        "format": format_weight
        * tag_format(
            *common,
            mode=format_mode,  # type: ignore[arg-type]
            maximum=format_maximum,
            minimum=format_minimum,
        ),
        "length": length_weight
        * thought_length(
            *common,
            target=length_target,
            tolerance=length_tolerance,
            maximum=length_maximum,
            minimum=length_minimum,
        ),
        "actions": actions_weight
        * action_similarity(*common, turns=turns, maximum=actions_maximum, minimum=actions_minimum),
    }
    shares = tuple(env_weight * share for share in from_env.turn_scores or ())
    return Score(sum(parts.values()), parts, shares)

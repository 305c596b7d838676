"""Metrics of a batch of episodes."""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from manus_jax.rollout.trajectory import FailedEpisode, Outcome, Trajectory, trajectories


def rollout_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Means and counts over the episodes; failed episodes are counted but excluded from means.

    env/…: actions per episode, valid ones (well-formed and not refused by the environment), turns
    that repeat a failure, episodes ended by the environment.
    episode/…: rewards, success, tokens, time. reward/…: the components of the reward function.
    rollout/…: failed episodes by kind, retries, prompts that extend or rewrite the history.
    """
    played = trajectories(outcomes)
    failed = [outcome for outcome in outcomes if isinstance(outcome, FailedEpisode)]
    metrics = {
        "rollout/episodes": float(len(played)),
        "rollout/failed": float(len(failed)),
        "rollout/retries": float(sum(outcome.attempts - 1 for outcome in outcomes)),
        "rollout/prompt_extended": float(sum(t.prompts_extended for t in played)),
        "rollout/prompt_forked": float(sum(t.prompts_forked for t in played)),
    }
    for kind, count in sorted(collections.Counter(f.kind for f in failed).items()):
        metrics[f"rollout/failed/{kind}"] = float(count)
    if played:
        metrics |= _episode_metrics(played) | _reward_metrics(played)
    return metrics


def staleness_metrics(played: Sequence[Trajectory], version: int) -> dict[str, float]:
    """By how many versions the weights that sampled each agent token precede `version`, those that
    are trained: mean and maximum, and the share of the tokens for each number of versions."""
    sampled = [s.versions[s.loss_mask] for t in played for s in t.segments]
    if not sampled:
        return {}
    staleness = version - np.concatenate(sampled)
    shares = np.bincount(np.maximum(staleness, 0)) / len(staleness)
    return {
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
        **{f"staleness/share_{lag}": float(share) for lag, share in enumerate(shares)},
    }


def _episode_metrics(played: Sequence[Trajectory]) -> dict[str, float]:
    turns = [len(t.turns) for t in played]
    valid = [sum(turn.accepted for turn in t.turns) for t in played]
    all_turns = [turn for t in played for turn in t.turns]
    spread: Mapping[str, Sequence[float]] = {
        "env/number_of_actions": turns,
        "episode/reward": [t.episode_reward for t in played],
        "response_length": [t.agent_tokens for t in played],
    }
    metrics = {
        f"{name}/{kind}": float(summary(values))
        for name, values in spread.items()
        for kind, summary in (("mean", np.mean), ("max", np.max), ("min", np.min))
    }
    return metrics | {
        "env/finish_ratio": _mean([t.end_reason == "done" for t in played]),
        "env/number_of_valid_action": _mean(valid),
        "env/ratio_of_valid_action": sum(valid) / max(1, sum(turns)),
        "env/ratio_of_rejected_action": _mean([turn.rejected for turn in all_turns]),
        "env/repeated_failures": _mean([_repeated_failures(t) for t in played]),
        "episode/env_reward": _mean([t.env_reward for t in played]),
        "episode/success_rate": _mean([t.success for t in played]),
        "response_length/clip_ratio": _mean([turn.cut for turn in all_turns]),
        "rollout/generation_seconds_per_turn": _mean(
            [turn.generation_seconds for turn in all_turns]
        ),
        "rollout/environment_seconds_per_turn": _mean(
            [turn.environment_seconds for turn in all_turns]
        ),
        **{
            f"episode/ended_by/{reason}": _mean([t.end_reason == reason for t in played])
            for reason in sorted({t.end_reason for t in played})
        },
    }


def _repeated_failures(trajectory: Trajectory) -> int:
    """Turns without a valid action that repeat the previous one word for word."""
    pairs = zip(trajectory.turns, trajectory.turns[1:], strict=False)
    return sum(a.text == b.text and not (a.accepted or b.accepted) for a, b in pairs)


def _reward_metrics(played: Sequence[Trajectory]) -> dict[str, float]:
    parts: dict[str, list[float]] = collections.defaultdict(list)
    for trajectory in played:
        if trajectory.score is not None:
            for name, value in trajectory.score.components.items():
                parts[name].append(value)
    penalties = [sum(turn.penalty for turn in t.turns) for t in played]
    if any(penalties):
        parts["invalid_action_penalty"] = penalties
    return {f"reward/{name}": _mean(values) for name, values in parts.items()}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0

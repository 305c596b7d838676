"""Metrics of a batch of episodes."""

import collections
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from manus_jax.rollout.trajectory import (
    FailedEpisode,
    Outcome,
    Trajectory,
    trajectories,
)

NGRAM = 2  # tokens; longer ones rarely recur in turns of a few tokens, however repetitive
_HASH_FACTORS = np.array([2654435761**i % 2**64 for i in range(NGRAM)], np.uint64)


def rollout_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Means and counts over the episodes; failed episodes are counted but excluded from means.

    env/…: actions per episode, valid ones (well-formed and not refused by the environment), turns
    that repeat a failure or leave the observation unchanged, episodes ended by the environment.
    episode/…: rewards, success, tokens, time. reward/…: the components of the reward function.
    rollout/…: failed episodes by kind, retries, prompts that extend or rewrite the history, tokens
    that rewritten prompts repeat, actions sent to environments (env_steps; replays count).
    repetition/…: the share of n-grams that occurred before in their turn, and of turns that are
    equal to the previous one.
    """
    played = trajectories(outcomes)
    failed = [outcome for outcome in outcomes if isinstance(outcome, FailedEpisode)]
    metrics = {
        "rollout/episodes": float(len(played)),
        "rollout/failed": float(len(failed)),
        "rollout/retries": float(sum(outcome.attempts - 1 for outcome in outcomes)),
        "rollout/prompt_extended": float(sum(t.prompts_extended for t in played)),
        "rollout/prompt_forked": float(sum(t.prompts_forked for t in played)),
        "rollout/forked_tokens": float(sum(t.forked_tokens for t in played)),
        "rollout/env_steps": float(sum(turn.valid for t in played for turn in t.turns)),
    }
    for kind, count in sorted(collections.Counter(f.kind for f in failed).items()):
        metrics[f"rollout/failed/{kind}"] = float(count)
    if played:
        metrics |= _episode_metrics(played) | _reward_metrics(played)
        metrics |= _group_metrics(played) | _token_metrics(played)
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
    all_turns = [turn for t in played for turn in t.own_turns]
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
        "env/ratio_of_unchanged_observation": _mean(
            [
                seen == turn.observation
                for t in played
                for seen, turn in zip(t.observations, t.turns, strict=True)
            ]
        ),
        "env/repeated_failures": _mean([_repeated_failures(t) for t in played]),
        "episode/env_reward": _mean([t.env_reward for t in played]),
        "episode/success_rate": _mean([t.success for t in played]),
        "response_length/clip_ratio": _mean([turn.cut for turn in all_turns]),
        "response_length/forced_thought_ratio": _mean([turn.forced > 0 for turn in all_turns]),
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


def _group_metrics(played: Sequence[Trajectory]) -> dict[str, float]:
    """Of the groups with several episodes, the shares whose rewards differ, and that have at least
    one success (pass@k for groups of k)."""
    groups: dict[str, list[Trajectory]] = collections.defaultdict(list)
    for trajectory in played:
        groups[trajectory.group_id].append(trajectory)
    compared = [group for group in groups.values() if len(group) > 1]
    if not compared:
        return {}
    return {
        "rollout/groups_with_signal": _mean(
            [len({t.episode_reward for t in group}) > 1 for group in compared]
        ),
        "episode/pass_at_k": _mean([any(t.success for t in group) for group in compared]),
    }


def _token_metrics(played: Sequence[Trajectory]) -> dict[str, float]:
    """Entropy, estimated by the negative log-probs of the sampled tokens, and repetition."""
    sampled = [s.log_probs[s.loss_mask] for t in played for s in t.segments]
    turns = [
        t.segments[turn.segment].token_ids[turn.start : turn.stop]
        for t in played
        for turn in t.own_turns
        if t.segments
    ]
    if not turns:
        return {}
    total, distinct = np.sum([_ngrams(ids) for ids in turns], axis=0).tolist()
    pairs = [(a.text, b.text) for t in played for a, b in itertools.pairwise(t.turns)]
    return {
        "rollout/entropy": -float(np.concatenate(sampled).mean()),
        "repetition/within_turns": (total - distinct) / max(1, total),
        "repetition/between_turns": _mean([a == b for a, b in pairs]),
    }


def _ngrams(ids: np.ndarray) -> tuple[int, int]:
    """The number of n-grams of a turn's tokens, and of distinct ones."""
    if len(ids) < NGRAM:
        return 0, 0
    windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), NGRAM)
    # Overflow is harmless in a hash.
    hashes = (windows * _HASH_FACTORS).sum(axis=1, dtype=np.uint64)
    return len(hashes), len(np.unique(hashes))


def _repeated_failures(trajectory: Trajectory) -> int:
    """Turns without a valid action that repeat the previous one word for word."""
    pairs = itertools.pairwise(trajectory.turns)
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

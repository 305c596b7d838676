"""Advantages of a batch: the step from rewards to what the update trains on."""

import jax
import numpy as np

from manus_jax.algorithms import gigpo
from manus_jax.algorithms.episode_tokens import EpisodeTokens
from manus_jax.algorithms.kl import ESTIMATORS, KLController, kl_in_reward, observed_kl
from manus_jax.algorithms.recipes import Recipe, compute_advantages
from manus_jax.data_proto import DataProto

_compute = jax.jit(compute_advantages, static_argnums=0)


def group_numbers(group_ids: np.ndarray) -> np.ndarray:
    """Group names [n] as numbers below their count in order of appearance, int32 [n]."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(g, len(numbers)) for g in group_ids], np.int32)


def add_advantages(
    batch: DataProto, recipe: Recipe, kl: KLController, similarity: float | None = None
) -> tuple[DataProto, dict[str, float], KLController]:
    """The batch with `advantages` (and `returns`), metrics, and the KL controller's new state.

    Reads the columns token_level_rewards and loss_mask; values, old_log_probs, ref_log_probs,
    greedy_rewards and turn_ids where the recipe needs them. `similarity` is GiGPO's threshold for
    treating two observations as the same state.
    """
    tokens = EpisodeTokens(batch)
    column = lambda name: tokens.gather(np.asarray(batch.batch[name]))
    count, mask = tokens.count, tokens.mask
    rewards = column("token_level_rewards")
    metrics: dict[str, float] = {}
    if recipe.kl_placement == "reward":
        estimate = ESTIMATORS[recipe.kl_estimator]
        kl_t = np.asarray(estimate(column("old_log_probs"), column("ref_log_probs")))
        rewards = np.asarray(kl_in_reward(rewards, kl_t, mask, kl.coef))
        seen = float(observed_kl(kl_t[:count], mask[:count]))
        metrics |= {"critic/kl": seen, "critic/kl_coeff": kl.coef}
        kl = kl.update(seen, count)
    groups = group_numbers(batch.non_tensor_batch["group_id"])
    steps = _steps(batch, tokens, groups, similarity) if recipe.needs_step_groups else None
    greedy = None
    if recipe.needs_greedy_baseline:
        greedy = tokens.per_episode(np.asarray(batch.batch["greedy_rewards"]))
    values = column("values") if recipe.needs_critic else None
    valid = tokens.per_episode(np.ones(len(batch), bool))
    adv, returns = _compute(
        recipe, rewards, mask, tokens.per_episode(groups), valid, values, greedy, steps
    )
    adv = np.asarray(adv)
    columns = {"advantages": tokens.scatter(adv)}
    scores = batch.non_tensor_batch["episode_reward"][tokens.first_rows].astype(np.float64)
    metrics |= _summary("critic/score", scores)
    metrics |= _summary("critic/rewards", rewards.sum(1)[:count])
    metrics |= _summary("critic/advantages", adv[mask])
    if returns is not None:
        ret = np.asarray(returns)
        columns["returns"] = tokens.scatter(ret)
        metrics |= _summary("critic/returns", ret[mask])
        if values is not None:
            metrics |= _summary("critic/values", values[mask])
            explained = 1 - np.var(ret[mask] - values[mask]) / (np.var(ret[mask]) + 1e-5)
            metrics["critic/vf_explained_var"] = float(explained)
    return batch.union(DataProto.from_dict(columns)), metrics, kl


def _steps(
    batch: DataProto, tokens: EpisodeTokens, groups: np.ndarray, similarity: float | None
) -> gigpo.Steps:
    """The turns of every episode: their rewards, and which of them start from the same state."""
    first = tokens.first_rows
    turn_rewards = batch.non_tensor_batch["turn_rewards"][first]
    observations = batch.non_tensor_batch["observations"][first]
    longest = -(-max(len(r) for r in turn_rewards) // 8) * 8
    rewards = np.zeros((tokens.shape[0], longest), np.float32)
    taken = np.zeros((tokens.shape[0], longest), bool)
    for row, turns in enumerate(turn_rewards):
        rewards[row, : len(turns)] = turns
        taken[row, : len(turns)] = True
    anchors = gigpo.cluster_anchors(list(observations), groups[first], similarity, longest)
    filled = np.zeros((tokens.shape[0], longest), anchors.dtype)
    filled[: tokens.count] = anchors
    turn_ids = tokens.gather(np.asarray(batch.batch["turn_ids"]))
    return gigpo.Steps(rewards, taken, filled, turn_ids)


def _summary(name: str, values: np.ndarray) -> dict[str, float]:
    if not values.size:
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }

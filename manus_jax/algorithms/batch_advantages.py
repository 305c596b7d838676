"""Advantages of a batch: the step from rewards to what the update trains on. And how far the
learner's log-probs differ from the sampler's.

Both are computed on the agent tokens of whole episodes, whose shapes are rounded, so that a step
compiles nothing that an earlier one has compiled.
"""

import jax
import numpy as np

from manus_jax.algorithms import dpo, gigpo, sibling
from manus_jax.algorithms.corrections import mismatch_metrics
from manus_jax.algorithms.episode_tokens import EpisodeTokens
from manus_jax.algorithms.kl import ESTIMATORS, KLController, kl_in_reward, observed_kl
from manus_jax.algorithms.recipes import Recipe, compute_advantages
from manus_jax.data_proto import DataProto

_compute = jax.jit(compute_advantages, static_argnums=0)
_pair_statistics = jax.jit(dpo.pair_statistics)
_mismatch = jax.jit(mismatch_metrics)


def group_numbers(group_ids: np.ndarray) -> np.ndarray:
    """Group names [n] as numbers below their count in order of appearance, int32 [n]."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(g, len(numbers)) for g in group_ids], np.int32)


def add_advantages(
    batch: DataProto, recipe: Recipe, kl: KLController, similarity: float | None = None
) -> tuple[DataProto, dict[str, float], KLController]:
    """The batch with `advantages` (and `returns`), metrics, and the KL controller's new state.

    Reads the columns token_level_rewards and loss_mask; values, old_log_probs, ref_log_probs,
    greedy_rewards, turn_ids, parent, branch_turn and success where the recipe needs them.
    `similarity` is GiGPO's threshold for treating two observations as the same state.
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
    tree = _tree(batch, tokens) if recipe.needs_tree else None
    preferences = None
    group_ids = tokens.per_episode(groups)
    if recipe.needs_preferences:
        ratios = (column("old_log_probs") - column("ref_log_probs")).sum(1)
        won = tokens.per_episode(batch.non_tensor_batch["success"].astype(bool))
        preferences = dpo.Preferences(ratios, won)
        found = _pair_statistics(preferences, group_ids, valid, recipe.beta)
        metrics |= {f"dpo/{name}": float(value) for name, value in found._asdict().items()}
    adv, returns = _compute(
        recipe, rewards, mask, group_ids, valid, values, greedy, steps, tree, preferences
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


def mismatch_of_batch(batch: DataProto, old_log_probs: np.ndarray) -> dict[str, float]:
    """`mismatch_metrics` of the learner's log-probs [rows, length] and the column
    sampler_log_probs."""
    tokens = EpisodeTokens(batch)
    sampler = tokens.gather(np.asarray(batch.batch["sampler_log_probs"]))
    found = _mismatch(tokens.gather(old_log_probs), sampler, tokens.mask)
    return {name: float(value) for name, value in found.items()}


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


def _tree(batch: DataProto, tokens: EpisodeTokens) -> sibling.Tree:
    """The episodes that branches come from, as rows, and the turns of their own."""
    host = {name: column[tokens.first_rows] for name, column in batch.non_tensor_batch.items()}
    rows = {uid: row for row, uid in enumerate(host["uid"])}
    parents, first = np.zeros((2, tokens.shape[0]), np.int32)
    roots = np.zeros(tokens.shape[0], bool)
    lengths = [len(turns) for turns in host["turn_rewards"]]
    taken = np.zeros((tokens.shape[0], -(-max(lengths) // 8) * 8), bool)
    orphans: dict[tuple[str, int], int] = {}
    for row, (parent, turn) in enumerate(zip(host["parent"], host["branch_turn"], strict=True)):
        parents[row], first[row], roots[row] = row, turn, parent is None
        if parent in rows:
            parents[row] = rows[parent]
        elif parent is not None:  # it was dropped; its branches at one turn still are siblings
            parents[row] = orphans.setdefault((parent, turn), row)
        taken[row, turn : lengths[row]] = True
    turn_ids = tokens.gather(np.asarray(batch.batch["turn_ids"]))
    return sibling.Tree(parents, first, roots, taken, turn_ids)


def _summary(name: str, values: np.ndarray) -> dict[str, float]:
    if not values.size:
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }

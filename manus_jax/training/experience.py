"""From finished episodes to what an update needs: per-token advantages, and who they belong to.

Advantages are computed on the agent's own tokens alone, one row per episode, its segments joined;
then each token's number goes back to the segment it lies in. So a forked memory, an observation or
a padding token cannot move one.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from manus_jax.algorithms import gigpo
from manus_jax.algorithms.advantages import has_signal
from manus_jax.algorithms.kl import ESTIMATORS, KLController, kl_in_reward, observed_kl
from manus_jax.algorithms.recipes import Recipe, compute_advantages
from manus_jax.learner.packing import Sample
from manus_jax.rollout.batch import Origin, RewardAllocation, to_samples
from manus_jax.rollout.trajectory import Trajectory


def rounded(n: int, multiple: int) -> int:
    """Up to a multiple, so that few shapes are ever compiled."""
    return -(-max(1, n) // multiple) * multiple


def group_numbers(episodes: Sequence[Trajectory]) -> np.ndarray:
    """The task of each episode as a number below their count, int32 [B]."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(e.group_id, len(numbers)) for e in episodes], np.int32)


def comparable(episodes: Sequence[Trajectory], recipe: Recipe) -> list[Trajectory]:
    """Without episodes that lost all their siblings to failures: nothing to compare them with."""
    if not recipe.needs_groups:
        return list(episodes)
    groups = group_numbers(episodes)
    return [e for e, g in zip(episodes, groups, strict=True) if (groups == g).sum() > 1]


def with_signal(episodes: Sequence[Trajectory]) -> list[Trajectory]:
    """The episodes of groups whose outcomes differ; on the outcome, not on a shaped reward."""
    if not episodes:
        return []
    outcomes = np.array([float(e.env_reward) for e in episodes], np.float32)
    keep = has_signal(outcomes, group_numbers(episodes), np.ones(len(episodes), bool))
    return [e for e, k in zip(episodes, np.asarray(keep), strict=True) if k]


@dataclasses.dataclass(frozen=True)
class Experience:
    """Samples in the order of their episodes, and for each the group and episode it comes from."""

    episodes: tuple[Trajectory, ...]
    samples: tuple[Sample, ...]
    origins: tuple[Origin, ...]

    @classmethod
    def of(cls, episodes: Sequence[Trajectory], allocation: RewardAllocation) -> "Experience":
        samples, origins = to_samples(episodes, allocation)
        return cls(tuple(episodes), tuple(samples), tuple(origins))

    @property
    def groups(self) -> np.ndarray:
        """Group number of each sample, int32 [samples]."""
        return group_numbers(self.episodes)[[o.trajectory for o in self.origins]]

    def with_field(self, name: str, values: Sequence[np.ndarray]) -> "Experience":
        """One more per-token field, float32 [T] per sample."""
        samples = tuple(
            dataclasses.replace(s, fields={**s.fields, name: v})
            for s, v in zip(self.samples, values, strict=True)
        )
        return dataclasses.replace(self, samples=samples)

    def rows(self, name: str, width: int, height: int) -> np.ndarray:
        """A field on agent tokens, one row per episode, float32 [height, width]."""
        out = np.zeros((height, width), np.float32)
        ends = np.zeros(height, np.int64)
        for sample, origin in zip(self.samples, self.origins, strict=True):
            values = sample.fields[name][sample.loss_mask]
            row = origin.trajectory
            out[row, ends[row] : ends[row] + len(values)] = values
            ends[row] += len(values)
        return out

    def tokens_per_episode(self) -> np.ndarray:
        counts = np.zeros(len(self.episodes), np.int64)
        for sample, origin in zip(self.samples, self.origins, strict=True):
            counts[origin.trajectory] += int(sample.loss_mask.sum())
        return counts

    def spread(self, rows: np.ndarray) -> list[np.ndarray]:
        """Rows [episodes, width] back onto the tokens of each sample, 0 outside the mask."""
        ends = np.zeros(len(self.episodes), np.int64)
        out = []
        for sample, origin in zip(self.samples, self.origins, strict=True):
            count = int(sample.loss_mask.sum())
            row = origin.trajectory
            values = np.zeros(len(sample), np.float32)
            values[sample.loss_mask] = rows[row, ends[row] : ends[row] + count]
            ends[row] += count
            out.append(values)
        return out


def add_advantages(
    experience: Experience,
    recipe: Recipe,
    kl_controller: KLController,
    greedy_scores: Sequence[float] | None = None,
    similarity: float | None = None,
) -> tuple[Experience, dict[str, float], KLController]:
    """The experience with `advantages` (and `returns`), metrics, and the KL controller's new state.

    Reads the fields token_rewards, and values, old_log_probs, ref_log_probs as the recipe needs.
    """
    episodes = experience.episodes
    count = len(episodes)
    height = rounded(count, 8)
    width = rounded(int(experience.tokens_per_episode().max(initial=1)), 128)
    mask = np.zeros((height, width), bool)
    for row, tokens in enumerate(experience.tokens_per_episode()):
        mask[row, :tokens] = True
    rows = functools.partial(experience.rows, width=width, height=height)
    rewards = rows("token_rewards")
    metrics: dict[str, float] = {}
    if recipe.kl_placement == "reward":
        estimate = ESTIMATORS[recipe.kl_estimator]
        kl_t = np.asarray(estimate(rows("old_log_probs"), rows("ref_log_probs")))
        rewards = np.asarray(kl_in_reward(rewards, kl_t, mask, kl_controller.coef))
        seen = float(observed_kl(kl_t[:count], mask[:count]))
        metrics |= {"critic/kl": seen, "critic/kl_coeff": kl_controller.coef}
        kl_controller = kl_controller.update(seen, count)
    padded = lambda x, fill: np.concatenate([x, np.full(height - count, fill, x.dtype)])
    steps = None
    if recipe.needs_step_groups:
        steps = _steps(experience, rows("turn_ids"), height, similarity)
    greedy = None
    if recipe.needs_greedy_baseline:
        assert greedy_scores is not None
        greedy = padded(np.array(greedy_scores, np.float32), 0.0)
    values = rows("values") if recipe.needs_critic else None
    adv, returns = _advantages(
        recipe,
        rewards,
        mask,
        padded(group_numbers(episodes), 0),
        padded(np.ones(count, bool), False),
        values,
        greedy,
        steps,
    )
    adv = np.asarray(adv)
    result = experience.with_field("advantages", experience.spread(adv))
    scores = np.array([e.episode_reward for e in episodes])
    metrics |= _summary("critic/score", scores)
    metrics |= _summary("critic/rewards", rewards.sum(1)[:count])
    metrics |= _summary("critic/advantages", adv[mask])
    if returns is not None:
        ret = np.asarray(returns)
        result = result.with_field("returns", experience.spread(ret))
        metrics |= _summary("critic/returns", ret[mask])
        if values is not None:
            metrics |= _summary("critic/values", values[mask])
            explained = 1 - np.var(ret[mask] - values[mask]) / (np.var(ret[mask]) + 1e-5)
            metrics["critic/vf_explained_var"] = float(explained)
    return result, metrics, kl_controller


_advantages = jax.jit(compute_advantages, static_argnums=0)


def _steps(
    experience: Experience, turn_ids: np.ndarray, height: int, similarity: float | None
) -> gigpo.Steps:
    episodes = experience.episodes
    longest = rounded(max(len(e.turns) for e in episodes), 8)
    rewards = np.zeros((height, longest), np.float32)
    taken = np.zeros((height, longest), bool)
    for row, episode in enumerate(episodes):
        rewards[row, : len(episode.turns)] = episode.turn_rewards
        taken[row, : len(episode.turns)] = True
    anchors = gigpo.cluster_anchors(
        [e.observations for e in episodes], group_numbers(episodes), similarity, longest
    )
    filled = np.zeros((height, longest), anchors.dtype)
    filled[: len(episodes)] = anchors
    return gigpo.Steps(rewards, taken, filled, turn_ids.astype(np.int32))


def _summary(name: str, values: np.ndarray) -> dict[str, float]:
    if not values.size:
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }

"""Several attempts at an episode, of which the best is kept.

    rollout.strategy = "best_of_n"
    rollout.strategy_parameters = {"n": 4}

The attempts are ranked by a reward function: by default the environment's reward, or any other one,
such as a judge (`select`, `select_parameters`). The first of the best is returned with its exact
tokens; the others are discarded.

Selected episodes are not samples of the policy: their log-probs are those of the sampler, but
their distribution is tilted towards high rewards. A policy gradient on them is biased, and the
success rate of an evaluation is not that of the policy (docs/strategies.md).
"""

from collections.abc import Mapping
from typing import Any

from manus_jax.rewards import RewardSettings
from manus_jax.rollout.scoring import score_outcome
from manus_jax.rollout.strategies.registry import STRATEGIES, RolloutContext, declares
from manus_jax.rollout.trajectory import EpisodeSpec, FailedEpisode, Outcome, Trajectory

MAX_ATTEMPTS = 1000


def _check(n: int, select: str, select_parameters: Mapping[str, Any]) -> None:
    if not 2 <= n <= MAX_ATTEMPTS:
        raise ValueError(f"n = {n} attempts: from 2 to {MAX_ATTEMPTS}")
    RewardSettings(select, select_parameters)


def _check_service(n: int, select: str, select_parameters: Mapping[str, Any]) -> None:
    RewardSettings(select, select_parameters).check_service()


@STRATEGIES.register("best_of_n")
@declares(check=_check, check_service=_check_service, in_validation=False)
def best_of_n(
    spec: EpisodeSpec,
    rollout: RolloutContext,
    *,
    n: int = 4,
    select: str = "env",
    select_parameters: Mapping[str, Any] = {},
) -> Outcome:
    """Plays `n` attempts one after another and returns the one with the highest `select` reward.

    Attempts that fail, or that cannot be scored, are not selected; if all do, so does the episode.
    """
    reward = RewardSettings(select, select_parameters)
    best, highest = None, 0.0
    first_failure: FailedEpisode | None = None
    for attempt in range(n):
        outcome = rollout.play(spec, attempt)
        scored = score_outcome(outcome, reward, "drop")
        if isinstance(scored, FailedEpisode):
            if scored.kind == "cancelled":
                return scored
            first_failure = first_failure or scored
        elif best is None or scored.episode_reward > highest:
            assert isinstance(outcome, Trajectory)
            best, highest = outcome, scored.episode_reward
    return best or first_failure  # type: ignore[return-value]  # there is at least one attempt

"""The default strategy: one episode."""

from manus_jax.rollout.strategies.registry import STRATEGIES, RolloutContext
from manus_jax.rollout.trajectory import EpisodeSpec, Outcome


@STRATEGIES.register("episode")
def episode(spec: EpisodeSpec, rollout: RolloutContext) -> Outcome:
    """Plays the episode once, with retries after infrastructure failures."""
    return rollout.play(spec)

"""The rollouts of a run, on process 0: plays tasks and returns groups of scored episodes."""

import dataclasses
from collections.abc import Callable, Sequence

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.algorithms.recipes import Recipe
from manus_jax.config.settings import AlgorithmSettings, RolloutSettings, TrainSettings
from manus_jax.data.mixture import Mixture
from manus_jax.data.tasks import Task
from manus_jax.engines.protocol import Engine
from manus_jax.evaluation.play import EvaluationResult
from manus_jax.rewards import RewardSettings
from manus_jax.rollout.batch import drop_singleton_groups, drop_uniform_groups
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.metrics import rollout_metrics
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.scoring import score_episodes
from manus_jax.rollout.trajectory import Outcome, Trajectory, episode_specs, trajectories


@dataclasses.dataclass(frozen=True)
class Played:
    """The rollouts of a step: all outcomes, the episodes to train on, and metrics."""

    outcomes: list[Outcome]
    episodes: list[Trajectory]
    metrics: dict[str, float]


@dataclasses.dataclass
class Rollouts:
    """Plays tasks with the current weights. `evaluate(name)` plays the validation tasks with the
    policy ("val") or one of the baselines."""

    train: TrainSettings
    algorithm: AlgorithmSettings
    recipe: Recipe
    reward: RewardSettings
    settings: RolloutSettings
    mixture: Mixture
    engine: Engine
    agent: EngineAgent
    pool: EnvironmentPool
    evaluate: Callable[[str], EvaluationResult]

    def take(self, step: int) -> Played:
        """The groups of one step. Dynamic sampling replaces groups without a learning signal."""
        settings = self._settings_at(step)
        outcomes: list[Outcome] = []
        kept: list[Trajectory] = []
        wanted = self.train.batch_size * self.train.group_size
        tries = self.algorithm.max_gen_batches if self.recipe.dynamic_sampling else 1
        for attempt in range(tries):
            tasks = self.mixture.next_batch(self.train.batch_size)
            batch = self._play(tasks, self.train.group_size, f"{step}.{attempt}/", settings)
            outcomes += batch
            fresh = trajectories(batch)
            if self.recipe.needs_groups:
                fresh = drop_singleton_groups(fresh)
            if self.recipe.dynamic_sampling:
                fresh = drop_uniform_groups(fresh)
            kept += fresh
            if len(kept) >= wanted:
                break
        metrics = rollout_metrics(outcomes)
        metrics["rollout/used"] = float(min(len(kept), wanted))
        metrics["rollout/gen_batches"] = float(attempt + 1)
        return Played(outcomes, kept[:wanted], metrics)

    def greedy_rewards(self, step: int, episodes: Sequence[Trajectory]) -> dict[str, float]:
        """The reward of one greedy episode per group; groups whose episode failed are omitted."""
        settings = self._settings_at(step)
        greedy = dataclasses.replace(settings, temperature=0.0)
        tasks = {e.group_id: e.task for e in episodes}
        played = self._play(list(tasks.values()), 1, f"{step}.greedy/", greedy)
        return {
            group: outcome.episode_reward
            for group, outcome in zip(tasks, played, strict=True)
            if isinstance(outcome, Trajectory)
        }

    def _play(
        self, tasks: Sequence[Task], group_size: int, prefix: str, settings: RolloutSettings
    ) -> list[Outcome]:
        specs = episode_specs(tasks, group_size, prefix)
        played = run_episodes(specs, self.agent, self.pool, settings)
        return score_episodes(played, self.reward, self.algorithm.on_reward_error)

    def _settings_at(self, step: int) -> RolloutSettings:
        """The settings with the turn limit of train.turns_schedule at this step."""
        schedule = self.train.turns_schedule
        if not schedule:
            return self.settings
        stage = min((step - 1) // self.train.turns_schedule_steps, len(schedule) - 1)
        return dataclasses.replace(self.settings, max_turns=schedule[stage])

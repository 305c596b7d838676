"""The rollouts of a run, on process 0: plays tasks and returns groups of scored episodes.

In a synchronous run (`train.max_staleness` 0), `take` plays the tasks of a step with the current
weights. Otherwise it takes groups from a stream that plays ahead of the learner, and new weights
are given to the engine in the background, under running episodes.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.algorithms.recipes import Recipe
from manus_jax.config.settings import AlgorithmSettings, RolloutSettings, TrainSettings
from manus_jax.data.mixture import Mixture
from manus_jax.data.tasks import Task
from manus_jax.engines.cancellation import Cancellation
from manus_jax.engines.protocol import Engine
from manus_jax.evaluation.play import EvaluationResult
from manus_jax.rewards import RewardSettings
from manus_jax.rollout.admission import Admission
from manus_jax.rollout.batch import drop_singleton_groups, drop_uniform_groups
from manus_jax.rollout.group_stream import GroupStream, Place
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.metrics import rollout_metrics, staleness_metrics
from manus_jax.rollout.runner import FailureLog, play_safely, run_episodes
from manus_jax.rollout.scoring import score_episodes, score_outcome
from manus_jax.rollout.trajectory import (
    EpisodeSpec,
    Outcome,
    Trajectory,
    episode_specs,
    group_specs,
    trajectories,
)
from manus_jax.status import STATUS

_GREEDY = "greedy/"  # prefix of the uid and the group of a greedy episode in a stream


@dataclasses.dataclass(frozen=True)
class Played:
    """The rollouts of a step: all outcomes, the episodes to train on, and metrics."""

    outcomes: list[Outcome]
    episodes: list[Trajectory]
    metrics: dict[str, float]
    greedy_rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    """The reward of the greedy episode by group, if it was played with the group."""


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

    def __post_init__(self) -> None:
        self._stream: GroupStream | None = None
        self._last_take = time.monotonic(), 0.0  # the time and the engine's busy seconds
        self._failures = FailureLog()
        self._publisher = ThreadPoolExecutor(1, "publish")
        self._publishing: Future[None] | None = None
        if self.train.max_staleness:
            size = self.train.batch_size
            self._stream = GroupStream(
                self.mixture,
                Admission(size, self.train.max_staleness),
                specs=self._group,
                play=self._play_one,
                accept=lambda outcomes: bool(self._usable(outcomes)),
                threads=self.settings.max_in_flight,
                max_dropped=size * self._tries,
            )

    def take(self, step: int) -> Played:
        """The groups of one step. Dynamic sampling replaces groups without a learning signal."""
        return self._play_now(step) if self._stream is None else self._take_ready(step)

    def publish(self, params: Any, version: int) -> None:
        """Gives the engine new weights; with a stream, in the background.

        An error in the background is raised by the next call of this or `wait_published`.
        """
        self.wait_published()
        if self._stream is None:
            self._publish(params, version)
        else:  # the next update donates the learner's buffers while they are being read
            copy = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, params)
            self._publishing = self._publisher.submit(self._publish, copy, version)

    def wait_published(self) -> None:
        """Waits until the engine has the weights of the last `publish`."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.result()

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs to continue with the same tasks, as JSON."""
        if self._stream is None:
            return {"mixture": self.mixture.state()}
        return {"stream": self._stream.state()}

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Continues from the `state` that was saved after `step`."""
        if self._stream is None:
            self.mixture.restore(state["mixture"])
        else:
            self._stream.restore(state["stream"], step)

    def close(self) -> None:
        """Ends running episodes and background work."""
        if self._stream is not None:
            self._stream.close()
        self._publisher.shutdown()

    def _publish(self, params: Any, version: int) -> None:
        self.engine.update_weights(params, version)
        STATUS.version = version
        if self._stream is not None:
            self._stream.publish(version)

    @property
    def _tries(self) -> int:
        return self.algorithm.max_gen_batches if self.recipe.dynamic_sampling else 1

    def _usable(self, outcomes: Sequence[Outcome]) -> list[Trajectory]:
        """The episodes that can be trained on; `outcomes` are whole groups."""
        usable = [t for t in trajectories(outcomes) if not t.uid.startswith(_GREEDY)]
        if self.recipe.needs_groups:
            usable = drop_singleton_groups(usable)
        return drop_uniform_groups(usable) if self.recipe.dynamic_sampling else usable

    def _take_ready(self, step: int) -> Played:
        assert self._stream is not None
        taken = self._stream.take()
        self._failures.report()
        now, busy = time.monotonic(), self.agent.usage.busy_seconds()
        idle = (now - self._last_take[0]) - (busy - self._last_take[1])
        self._last_take = now, busy
        outcomes = [o for group in taken.groups for o in group.episodes()]
        episodes = self._usable(outcomes)
        outcomes += [o for group in taken.dropped for o in group.episodes()]
        greedy = {
            t.group_id.removeprefix(_GREEDY): t.episode_reward
            for t in trajectories(outcomes)
            if t.uid.startswith(_GREEDY)
        }
        outcomes = [o for o in outcomes if not o.spec.uid.startswith(_GREEDY)]
        metrics = rollout_metrics(outcomes) | staleness_metrics(episodes, step - 1)
        metrics["rollout/used"] = float(len(episodes))
        metrics["timing_s/idle_learner"] = taken.seconds
        metrics["timing_s/idle_engine"] = max(0.0, idle)
        admission = self._stream.admission
        metrics["rollout/groups_ready"] = float(admission.ready)
        metrics["rollout/groups_running"] = float(admission.running)
        metrics["rollout/groups_dropped"] = float(len(taken.dropped))
        return Played(outcomes, episodes, metrics, greedy)

    def _group(self, number: int, place: Place) -> list[EpisodeSpec]:
        """The episodes of a group, named as in a synchronous run."""
        step, row = divmod(number, self.train.batch_size)
        task = self.mixture.task(place)
        specs = group_specs(task, self.train.group_size, f"{step + 1}.0/{row}")
        if self.recipe.needs_greedy_baseline:
            greedy = f"{_GREEDY}{specs[0].group_id}"
            specs.append(EpisodeSpec(task, greedy, greedy))
        return specs

    def _play_one(self, spec: EpisodeSpec, number: int, cancellation: Cancellation) -> Outcome:
        settings = self._settings_at(number // self.train.batch_size + 1)
        if spec.uid.startswith(_GREEDY):
            settings = dataclasses.replace(settings, temperature=0.0)
        played = play_safely(spec, self.agent, self.pool, settings, cancellation, self._failures)
        return score_outcome(played, self.reward, self.algorithm.on_reward_error)

    def _play_now(self, step: int) -> Played:
        settings = self._settings_at(step)
        outcomes: list[Outcome] = []
        kept: list[Trajectory] = []
        wanted = self.train.batch_size * self.train.group_size
        for attempt in range(self._tries):
            tasks = self.mixture.next_batch(self.train.batch_size)
            batch = self._play(tasks, self.train.group_size, f"{step}.{attempt}/", settings)
            outcomes += batch
            kept += self._usable(batch)
            if len(kept) >= wanted:
                break
        metrics = rollout_metrics(outcomes)
        metrics["rollout/used"] = float(min(len(kept), wanted))
        metrics["rollout/gen_batches"] = float(attempt + 1)
        return Played(outcomes, kept[:wanted], metrics)

    def greedy_rewards(self, step: int, played: Played) -> dict[str, float]:
        """The reward of one greedy episode per group; groups whose episode failed are omitted."""
        if self._stream is not None:
            return played.greedy_rewards
        settings = self._settings_at(step)
        greedy = dataclasses.replace(settings, temperature=0.0)
        tasks = {e.group_id: e.task for e in played.episodes}
        outcomes = self._play(list(tasks.values()), 1, f"{step}.greedy/", greedy)
        return {
            group: outcome.episode_reward
            for group, outcome in zip(tasks, outcomes, strict=True)
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

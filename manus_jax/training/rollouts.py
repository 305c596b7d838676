"""The rollouts of a run, on process 0: plays tasks and returns groups of scored episodes.

In a synchronous run (`train.max_staleness` 0), `take` plays the tasks of a step with the current
weights, or takes recorded episodes (`train.trajectories`). Otherwise it takes groups from a stream
that plays ahead of the learner, and new weights are given to the engine in the background, under
running episodes. Validations then run in the background as well, with the weights of their step.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

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
from manus_jax.rollout.batch import drop_singleton_groups, drop_uniform_groups, keep_by_success
from manus_jax.rollout.group_stream import GroupStream, Place
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.metrics import rollout_metrics, staleness_metrics
from manus_jax.rollout.recorded import RecordedGroups
from manus_jax.rollout.runner import FailureLog, play_safely, run_episodes
from manus_jax.rollout.scoring import score_episodes, score_outcome, shuffle_rewards
from manus_jax.rollout.strategies import episodes_per_spec, for_validation
from manus_jax.rollout.trajectory import (
    EpisodeSpec,
    FailedEpisode,
    Outcome,
    Trajectory,
    episode_specs,
    group_specs,
    trajectories,
)
from manus_jax.status import STATUS
from manus_jax.timeline import TIMELINE
from manus_jax.training.engine_weights import EngineWeights
from manus_jax.training.episode_limit import EpisodeLimit

_GREEDY = "greedy/"  # prefix of the uid and the group of a greedy episode in a stream
_REPLACEMENT = "~replacement"  # suffix of the uid of an episode that replaces an overdue one


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
    """Plays tasks with the current weights. `evaluate(name, stop)` plays the validation tasks with
    the policy ("val") or one of the baselines, until the event `stop` is set."""

    train: TrainSettings
    algorithm: AlgorithmSettings
    recipe: Recipe
    reward: RewardSettings
    settings: RolloutSettings
    mixture: Mixture
    engine: Engine
    agent: EngineAgent
    pool: EnvironmentPool
    evaluate: Callable[[str, threading.Event], EvaluationResult]
    recorded: Sequence[Trajectory] = ()  # episodes of earlier runs, to train on instead of playing

    def __post_init__(self) -> None:
        self._stream: GroupStream | None = None
        self._weights: EngineWeights | None = None
        self._last_take = time.monotonic(), 0.0  # the time and the engine's busy seconds
        self._failures = FailureLog()
        self._closing = threading.Event()
        self._limit = EpisodeLimit(self.settings, self.engine)
        self._recorded: RecordedGroups | None = None
        if self.recorded:
            size, seed = self.train.batch_size, self.train.seed
            self._recorded = RecordedGroups(self.recorded, self._usable, size, seed)
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
            self._stream.limit_episodes(self._limit.count)
            self._weights = EngineWeights(self._publish)

    def take(self, step: int) -> Played:
        """The groups of one step. Dynamic sampling replaces groups without a learning signal."""
        if self._recorded is not None:
            played = self._take_recorded(self._recorded, step)
        else:
            stream = self._stream
            played = self._play_now(step) if stream is None else self._take_ready(stream, step)
            played.metrics["timing_s/idle_engine"] = self._idle_engine()
        if self.algorithm.shuffle_rewards:
            shuffled = shuffle_rewards(played.episodes, (self.train.seed, step))
            played = dataclasses.replace(played, episodes=shuffled)
        return played

    def update_weights(self, params: Any, version: int) -> None:
        """Gives the engine new weights; with a stream, in the background."""
        if self._weights is None:
            self._publish(params, version)
        else:
            self._weights.publish(params, version)

    def wait_published(self) -> None:
        """Waits until the engine has the weights of the last `publish`."""
        if self._weights is not None:
            self._weights.wait()

    def validate(self, *names: str) -> "Future[list[EvaluationResult]]":
        """Plays the validation tasks with the newest weights and each of the named policies; with
        a stream, in the background, while newer weights are held back from the engine."""

        def play() -> list[EvaluationResult]:
            with TIMELINE.span("weights", "held back during validation"):
                return [self.evaluate(name, self._closing) for name in names]

        if self._weights is not None:
            return self._weights.run_frozen(play)
        played: Future[list[EvaluationResult]] = Future()
        played.set_result(play())
        return played

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint of `step` needs to continue with the same tasks, as JSON."""
        if self._recorded is not None:
            return {"recorded": self._recorded.fingerprint}
        if self._stream is None:
            return {"mixture": self.mixture.state()}
        return {"stream": self._stream.state(step)}

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Continues from the `state` that was saved after `step`."""
        if self._recorded is not None:
            self._recorded.check(state.get("recorded"))
        elif self._stream is None:
            self.mixture.restore(state["mixture"])
        else:
            self._stream.restore(state["stream"], step)

    def close(self) -> None:
        """Ends running episodes and background work."""
        self._closing.set()
        if self._stream is not None:
            self._stream.close()
        if self._weights is not None:
            self._weights.close()

    def _publish(self, params: Any, version: int) -> None:
        with TIMELINE.span("weights", f"version {version}"):
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
        if self.recipe.keeps is not None:
            usable = keep_by_success(usable, self.recipe.keeps)
        if self.recipe.needs_groups:
            usable = drop_singleton_groups(usable)
        return drop_uniform_groups(usable) if self.recipe.dynamic_sampling else usable

    def _take_recorded(self, recorded: RecordedGroups, step: int) -> Played:
        episodes = recorded.take(step)
        metrics = rollout_metrics(episodes) | {"rollout/used": float(len(episodes))}
        return Played([*episodes], episodes, metrics)

    def _take_ready(self, stream: GroupStream, step: int) -> Played:
        taken = stream.take()
        self._failures.report()
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
        metrics |= self._limit.metrics()
        admission = stream.admission
        metrics["rollout/groups_ready"] = float(admission.ready)
        metrics["rollout/groups_running"] = float(admission.running)
        metrics["rollout/groups_dropped"] = float(len(taken.dropped))
        return Played(outcomes, episodes, metrics, greedy)

    def _idle_engine(self) -> float:
        """Seconds without a request in the engine since the last call."""
        now, busy = time.monotonic(), self.agent.usage.busy_seconds()
        idle = (now - self._last_take[0]) - (busy - self._last_take[1])
        self._last_take = now, busy
        return max(0.0, idle)

    def _group(self, number: int, place: Place) -> list[EpisodeSpec]:
        """The episodes of a group, named as in a synchronous run."""
        step, row = divmod(number, self.train.batch_size)
        task = self.mixture.task(place)
        specs = group_specs(task, self.train.group_size, f"{step + 1}.0/{row}")
        if self.recipe.needs_greedy_baseline:
            greedy = f"{_GREEDY}{specs[0].group_id}"
            specs.append(EpisodeSpec(task, greedy, greedy))
        return specs

    def _play_one(
        self, spec: EpisodeSpec, number: int, cancellation: Cancellation
    ) -> list[Outcome]:
        settings = self._settings_at(number // self.train.batch_size + 1)
        if spec.uid.startswith(_GREEDY):
            settings = _greedy(settings)
        played: list[Outcome] = []
        # An overdue episode is replaced once, so that its group stays complete.
        for each in (spec, dataclasses.replace(spec, uid=f"{spec.uid}{_REPLACEMENT}")):
            ended = play_safely(each, self.agent, self.pool, settings, cancellation, self._failures)
            played += ended
            for outcome in ended:
                if self._stream is not None and self._limit.after(outcome, self._stream.in_flight):
                    self._stream.limit_episodes(self._limit.count)
            if not all(isinstance(o, FailedEpisode) and o.kind == "overdue" for o in ended):
                break
        on_error = self.algorithm.on_reward_error
        return [score_outcome(outcome, self.reward, on_error) for outcome in played]

    def _play_now(self, step: int) -> Played:
        settings = self._settings_at(step)
        outcomes: list[Outcome] = []
        kept: list[Trajectory] = []
        wanted = self.train.batch_size * self.train.group_size * episodes_per_spec(settings)
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
        metrics |= self._limit.metrics()
        return Played(outcomes, kept[:wanted], metrics)

    def greedy_rewards(self, step: int, played: Played) -> dict[str, float]:
        """The reward of one greedy episode per group; groups whose episode failed are omitted."""
        if self._stream is not None:
            return played.greedy_rewards
        greedy = _greedy(self._settings_at(step))
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
        settings = dataclasses.replace(settings, max_in_flight=self._limit.count)
        in_flight = min(len(specs), self._limit.count)

        def watch(index: int, outcome: Outcome) -> None:
            self._limit.after(outcome, in_flight)

        played = run_episodes(specs, self.agent, self.pool, settings, watch)
        return score_episodes(played, self.reward, self.algorithm.on_reward_error)

    def _settings_at(self, step: int) -> RolloutSettings:
        """The settings with the turn limit of train.turns_schedule at this step."""
        schedule = self.train.turns_schedule
        if not schedule:
            return self.settings
        stage = min((step - 1) // self.train.turns_schedule_steps, len(schedule) - 1)
        return dataclasses.replace(self.settings, max_turns=schedule[stage])


def _greedy(settings: RolloutSettings) -> RolloutSettings:
    return dataclasses.replace(for_validation(settings), temperature=0.0)

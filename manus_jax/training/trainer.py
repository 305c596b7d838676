"""The training loop: tasks, episodes, advantages, updates, new weights; again.

Each step plays `batch_size` tasks `group_size` times with the current weights, turns what came of
it into per-token advantages, updates the policy (and the critic), and hands the new weights to the
engine under a new version. Which algorithm that is, the recipe says; the loop does not know. What
decides the next step is all in the checkpoint: states, task cursor, KL controller. Random numbers
are derived from the seed and the step, so a resumed run repeats none and skips none.

Of several processes the first runs this loop; what concerns all, they do `together`.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.markup import escape

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.algorithms.corrections import mismatch_metrics
from manus_jax.algorithms.kl import (
    AdaptiveKL,
    FixedKL,
    KLController,
    controller_from_json,
    controller_to_json,
)
from manus_jax.algorithms.recipes import Recipe
from manus_jax.config.settings import AlgorithmSettings, TrainSettings
from manus_jax.data.tasks import Mixture, Task
from manus_jax.engines.protocol import Engine
from manus_jax.errors import Stopped, UserError
from manus_jax.evaluation.play import EvaluationResult
from manus_jax.learner.learner import Learner, Reference, Together
from manus_jax.models.transformer import Params
from manus_jax.reporting.page import write_report
from manus_jax.rewards import RewardSettings
from manus_jax.rollout.batch import RewardAllocation
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.metrics import rollout_metrics
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.scoring import score_episodes
from manus_jax.rollout.settings import RolloutSettings
from manus_jax.rollout.trajectory import Outcome, Trajectory, episode_specs, trajectories
from manus_jax.rollout.trajectory_files import write_trajectories
from manus_jax.training.checkpoints import Checkpoints
from manus_jax.training.experience import Experience, add_advantages, comparable, with_signal
from manus_jax.training.metric_sinks import open_sinks
from manus_jax.training.progress import ProgressLine
from manus_jax.training.run_directory import RunDirectory
from manus_jax.training.run_summary import validation_file
from manus_jax.training.stopping import Preempted, stop_requests


class TrainingError(UserError, RuntimeError):
    """The run cannot go on; the message says why and what to look at."""


class Troubles:
    """What goes wrong once is told and trained around; what goes on going wrong ends the run."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bad_updates = self._lost_steps = 0

    def after(self, metrics: Mapping[str, float], bad_updates: int) -> str | None:
        """What to tell of a step; TrainingError when it has happened too often in a row."""
        self._bad_updates = self._bad_updates + bad_updates if bad_updates else 0
        played, failed = metrics["rollout/episodes"], metrics["rollout/failed"]
        self._lost_steps = 0 if played else self._lost_steps + 1
        kinds = ", ".join(
            f"{name.removeprefix('rollout/failed/')} {count:.0f}"
            for name, count in metrics.items()
            if name.startswith("rollout/failed/")
        )
        told = []
        if failed:
            told.append(f"{failed:.0f} of {played + failed:.0f} episodes were dropped: {kinds}")
        if bad_updates:
            told.append(f"{bad_updates} updates skipped: the gradient is not finite")
        if self._bad_updates >= self._limit:
            raise TrainingError(
                f"{self._bad_updates} updates in a row had a gradient that is not finite; the last "
                "checkpoint is whole. Look at the run's trajectories and rewards, lower "
                "optimizer.lr"
            )
        if self._lost_steps >= self._limit:
            raise TrainingError(
                f"not one episode could be played to its end in {self._lost_steps} steps in a row "
                f"({kinds}); the last checkpoint is whole. The run's trajectories hold the errors"
            )
        return "; ".join(told) or None


class Timer:
    """Seconds by phase of one step; what no phase claims is `other`, so that they add up."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def metrics(self) -> dict[str, float]:
        step = time.monotonic() - self._began
        other = step - sum(self.seconds.values())
        phases = {**self.seconds, "other": other, "step": step}
        return {f"timing_s/{name}": seconds for name, seconds in phases.items()}


@dataclasses.dataclass
class Trainer:
    """All the parts of a run, built and checked."""

    train: TrainSettings
    algorithm: AlgorithmSettings
    recipe: Recipe
    reward: RewardSettings
    rollout: RolloutSettings
    mixture: Mixture
    policy: Learner
    critic: Learner | None
    reference: Reference | None
    engine: Engine
    agent: EngineAgent
    pool: EnvironmentPool
    directory: RunDirectory
    checkpoints: Checkpoints
    evaluate: Callable[[str], EvaluationResult]  # "val", or the name of a yardstick
    lr: Any  # step -> float
    weights: Callable[[], Params]  # the policy's, as the engine takes them
    together: Together
    preempted: Preempted | None

    def __post_init__(self) -> None:
        self.allocation = RewardAllocation(
            self.algorithm.reward_allocation, self.algorithm.allocation_gamma
        )
        self.kl_controller: KLController = FixedKL(self.recipe.kl_coef)
        if self.algorithm.kl_controller == "adaptive":
            self.kl_controller = AdaptiveKL(
                self.recipe.kl_coef, self.algorithm.target_kl, self.algorithm.kl_horizon
            )

    def run(self) -> dict[str, float]:
        """Trains to `total_steps`, from the newest checkpoint if there is one; last metrics."""
        train = self.train
        start = self._restore()
        last: dict[str, float] = {}
        troubles = Troubles(train.max_bad_updates)
        with (
            stop_requests(
                "stopping after this step; once more stops at once", self.preempted
            ) as stop,
            ProgressLine("train", train.total_steps, start) as line,
            open_sinks(train, self.directory, start) as log,
        ):
            if start:
                line.say(f"resumed at step {start}")
            if start == 0 and (train.val_before_train or train.val_only):
                for name in train.yardsticks:
                    last |= self.evaluate(name).metrics(f"val_{name}")
                last |= self._validate(0)
                self.directory.append_metrics({"step": 0, **last})
                log(0, last)
                line.say(_validation_line(0, last))
            timer = Timer()
            with timer.phase("report"):
                self._report(line)
            if train.val_only:
                return last
            stop.after(start)
            for step in range(start + 1, train.total_steps + 1):
                metrics, bad_updates = self._step(step, timer)
                metrics["training/global_step"] = float(step)
                trouble = troubles.after(metrics, bad_updates)
                if trouble:
                    line.say(f"step {step}: {trouble}")
                if step % train.test_freq == 0 or step == train.total_steps:
                    with timer.phase("testing"):
                        metrics |= self._validate(step)
                    line.say(_validation_line(step, metrics))
                stopping = stop.after(step)
                if step % train.save_freq == 0 or step == train.total_steps or stopping:
                    metrics |= timer.metrics()
                    with timer.phase("save_checkpoint"):
                        self._save(step, metrics)
                metrics |= timer.metrics()
                self.directory.append_metrics({"step": step, **metrics})
                log(step, metrics)
                last |= metrics
                # The report shows the metrics of its step, so its time is the next step's.
                timer = Timer()
                if step % train.test_freq == 0 or step == train.total_steps or stopping:
                    with timer.phase("report"):
                        self._report(line)
                shown = ("critic/score/mean", "episode/success_rate", "actor/pg_loss")
                line.update(step, {name.split("/")[1]: metrics.get(name, 0.0) for name in shown})
                if stopping and step < train.total_steps:
                    self.checkpoints.wait()
                    raise Stopped(
                        f"stopped after step {step} of {train.total_steps}, which is saved; "
                        "the same command goes on from there",
                        stop.exit_code,
                    )
        self.checkpoints.wait()
        return last

    def _report(self, line: ProgressLine) -> None:
        try:
            write_report(self.directory.path)
        # Whatever is wrong with the page, training goes on.
        except Exception as error:
            line.say(escape(f"report.html was not written: {type(error).__name__}: {error}"))

    def _validate(self, step: int) -> dict[str, float]:
        result = self.evaluate("val")
        write_trajectories(
            self.directory.path / "trajectories", validation_file(step), result.outcomes
        )
        return result.metrics()

    def _step(self, step: int, timer: Timer) -> tuple[dict[str, float], int]:
        """One step; its metrics, and how many of its updates had a bad gradient."""
        settings = self._settings_at(step)
        with timer.phase("gen"):
            outcomes, episodes, metrics = self._collect(step, settings)
        experience = None
        try:
            if episodes:
                experience = self._experience(step, episodes, settings, metrics, timer)
        finally:  # what was played is kept, whatever happens to it
            advantages = None if experience is None else _advantages_by_uid(experience)
            write_trajectories(self.directory.path / "trajectories", step, outcomes, advantages)
        if experience is None:
            metrics["training/empty_step"] = 1.0
            return metrics, 0
        update_metrics, bad = self._update(step, experience, timer)
        metrics |= update_metrics
        with timer.phase("update_weights"):
            self.engine.update_weights(self.weights(), step)
        metrics |= {f"engine/{name}": float(n) for name, n in self.engine.metrics().items()}
        metrics |= {f"env_pool/{name}": float(n) for name, n in self.pool.counters().items()}
        return metrics, bad

    def _experience(
        self,
        step: int,
        episodes: Sequence[Trajectory],
        settings: RolloutSettings,
        metrics: dict[str, float],
        timer: Timer,
    ) -> Experience:
        """The episodes with all that their update needs; what is measured goes to `metrics`."""
        experience = Experience.of(episodes, self.allocation)
        with timer.phase("logp"):
            experience = self._with_old_log_probs(experience, metrics)
        if self.reference is not None:
            with timer.phase("ref"):
                ref = self.policy.forward(experience.samples, self.reference)
                experience = experience.with_field("ref_log_probs", ref)
        if self.critic is not None:
            with timer.phase("compute_values"):
                values = self.critic.forward(experience.samples)
                experience = experience.with_field("values", values)
        greedy = None
        if self.recipe.needs_greedy_baseline:
            with timer.phase("gen_greedy"):
                greedy = self._greedy_scores(step, experience.episodes, settings)
        with timer.phase("adv"):
            experience, advantage_metrics, self.kl_controller = add_advantages(
                experience, self.recipe, self.kl_controller, greedy, self.algorithm.similarity
            )
        metrics |= advantage_metrics
        return experience

    def _settings_at(self, step: int) -> RolloutSettings:
        """The turn limit grows by the schedule."""
        schedule = self.train.turns_schedule
        if not schedule:
            return self.rollout
        stage = min((step - 1) // self.train.turns_schedule_steps, len(schedule) - 1)
        return dataclasses.replace(self.rollout, max_turns=schedule[stage])

    def _collect(
        self, step: int, settings: RolloutSettings
    ) -> tuple[list[Outcome], list[Trajectory], dict[str, float]]:
        """Everything that was played, and of it the episodes to learn from."""
        train = self.train
        outcomes: list[Outcome] = []
        kept: list[Trajectory] = []
        wanted = train.batch_size * train.group_size
        tries = self.algorithm.max_gen_batches if self.recipe.dynamic_sampling else 1
        for attempt in range(tries):
            tasks = self.mixture.next_batch(train.batch_size)
            batch = self._play(tasks, f"{step}.{attempt}/", settings)
            outcomes += batch
            fresh = comparable(trajectories(batch), self.recipe)
            if self.recipe.dynamic_sampling:
                fresh = with_signal(fresh)
            kept += fresh
            if len(kept) >= wanted:
                break
        metrics = rollout_metrics(outcomes)
        metrics["rollout/used"] = float(min(len(kept), wanted))
        metrics["rollout/gen_batches"] = float(attempt + 1)
        return outcomes, kept[:wanted], metrics

    def _play(self, tasks: Sequence[Task], prefix: str, settings: RolloutSettings) -> list[Outcome]:
        specs = episode_specs(tasks, self.train.group_size, prefix)
        played = run_episodes(specs, self.agent, self.pool, settings)
        return score_episodes(played, self.reward, self.algorithm.on_reward_error)

    def _greedy_scores(
        self, step: int, episodes: Sequence[Trajectory], settings: RolloutSettings
    ) -> list[float]:
        """For each episode the score of one greedy episode of its task (its own if that failed)."""
        tasks = {e.group_id: e.task for e in episodes}
        greedy = dataclasses.replace(
            settings, sampling=dataclasses.replace(settings.sampling, temperature=0.0)
        )
        specs = episode_specs(list(tasks.values()), 1, f"{step}.greedy/")
        played = run_episodes(specs, self.agent, self.pool, greedy)
        scored = score_episodes(played, self.reward, self.algorithm.on_reward_error)
        scores = {
            group: outcome.episode_reward
            for group, outcome in zip(tasks, scored, strict=True)
            if isinstance(outcome, Trajectory)
        }
        return [scores.get(e.group_id, e.episode_reward) for e in episodes]

    def _with_old_log_probs(self, experience: Experience, metrics: dict[str, float]) -> Experience:
        sampler = [s.fields["sampler_log_probs"] for s in experience.samples]
        if self.algorithm.old_log_probs == "bypass":
            return experience.with_field("old_log_probs", sampler)
        old = self.policy.forward(experience.samples)
        mask = np.concatenate([s.loss_mask for s in experience.samples])
        mismatch = mismatch_metrics(np.concatenate(old), np.concatenate(sampler), mask)
        metrics |= {f"mismatch/{name}": float(value) for name, value in mismatch.items()}
        return experience.with_field("old_log_probs", old)

    def _update(
        self, step: int, experience: Experience, timer: Timer
    ) -> tuple[dict[str, float], int]:
        """`ppo_epochs` passes over the step's groups in mini-batches; mean metrics, bad updates."""
        algorithm = self.algorithm
        fields = [f for f in self.recipe.loss_fields if f not in ("mask", "segment_ids", "entropy")]
        actor: list[dict[str, float]] = []
        critic: list[dict[str, float]] = []
        groups = experience.groups
        for epoch in range(algorithm.ppo_epochs):
            order = np.random.default_rng((self.train.seed, step, epoch)).permutation(
                np.unique(groups)
            )
            size = algorithm.mini_batch_size or len(order)
            for start in range(0, len(order), size):
                members = np.isin(groups, order[start : start + size])
                batch = [s for s, m in zip(experience.samples, members, strict=True) if m]
                if self.critic is not None:
                    with timer.phase("update_critic"):
                        critic.append(
                            self.critic.update(batch, ("values", "returns"), "token-mean")
                        )
                if step > algorithm.critic_warmup:
                    with timer.phase("update_actor"):
                        actor.append(
                            self.policy.update(
                                batch, fields, self.recipe.aggregation, algorithm.norm_constant
                            )
                        )
        metrics = {f"actor/{k}": v for k, v in _means(actor).items() if "/" not in k}
        metrics |= {k: v for k, v in _means(actor).items() if "/" in k}
        metrics |= {f"critic/{k}": v for k, v in _means(critic).items() if "/" not in k}
        if actor:
            metrics["actor/lr"] = float(self.lr(int(self.policy.state.step) - 1))
        bad = sum(int(m["update_skipped"]) for m in (*actor, *critic))
        return metrics, bad

    def _learners(self) -> dict[str, Learner]:
        learners = {"policy": self.policy}
        return learners if self.critic is None else {**learners, "critic": self.critic}

    def _save(self, step: int, metrics: dict[str, float]) -> None:
        rates = [v for k, v in metrics.items() if k.startswith("val/") and k.endswith("/score")]
        host = {
            "mixture": self.mixture.state(),
            "kl_controller": controller_to_json(self.kl_controller),
            "metrics": metrics,  # a kill may come before they are in their file
        }
        score = float(np.mean(rates)) if rates else None
        with self.together(do="save", step=step, score=score):
            save_states(self.checkpoints, step, self._learners(), host, score)

    def _restore(self) -> int:
        start = self.checkpoints.latest() or 0
        if start:
            with self.together(do="restore", step=start):
                host = restore_states(self.checkpoints, start, self._learners())
            self.mixture.restore(host["mixture"])
            self.kl_controller = controller_from_json(host["kl_controller"])
            self.engine.update_weights(self.weights(), start)
        self.directory.forget_metrics_after(start or -1)
        if start and all(line["step"] != start for line in self.directory.metrics()):
            self.directory.append_metrics({"step": start, **host["metrics"]})
        return start


def save_states(
    checkpoints: Checkpoints,
    step: int,
    learners: Mapping[str, Learner],
    host: dict[str, Any],
    score: float | None,
) -> None:
    """What all processes do of a save; `host` is process 0's."""
    checkpoints.save(step, {name: x.state for name, x in learners.items()}, host, score)


def restore_states(
    checkpoints: Checkpoints, step: int, learners: Mapping[str, Learner]
) -> dict[str, Any]:
    """What all processes do of a restore; returns what was saved of the host."""
    abstract = {name: learner.abstract_state() for name, learner in learners.items()}
    states, host = checkpoints.restore(step, abstract)
    for name, learner in learners.items():
        learner.state = states[name]
    return host


def _advantages_by_uid(experience: Experience) -> dict[str, list[np.ndarray]]:
    """Of every segment's tokens, [T] each."""
    found: dict[str, list[np.ndarray]] = {}
    for sample, origin in zip(experience.samples, experience.origins, strict=True):
        uid = experience.episodes[origin.trajectory].uid
        found.setdefault(uid, []).append(sample.fields["advantages"])
    return found


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {k: float(np.mean([row[k] for row in rows])) for k in rows[0]} if rows else {}


def _validation_line(step: int, metrics: dict[str, float]) -> str:
    shown = [
        f"{name.removeprefix('val/')} {value:.3f}"
        for name, value in metrics.items()
        if name.startswith("val/") and name.endswith(("/success_rate", "/score"))
    ]
    return f"validation at step {step}: " + ", ".join(shown)

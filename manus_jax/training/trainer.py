"""The training loop: rollouts, advantages, updates, new weights.

Each step plays `batch_size` tasks `group_size` times with the current weights (`make_batch`), turns
the episodes into per-token advantages, updates the policy (and the critic), and gives the new
weights to the engine as a new version (`Trainer.step`). The recipe determines the algorithm; the
loop is independent of it. Everything that determines the next step is in the checkpoint: states,
task cursor, KL controller. Random numbers are derived from the seed and the step, so a resumed run
neither repeats nor skips any.

Every process of a job runs this loop on the same batch. Process 0 also runs the rollouts and writes
the run directory.

If episodes are played ahead of the learner (`train.max_staleness`), the same loop waits for less:
the next batch is made during the current step, and the metrics of an update are fetched after the
next one has been started.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manus_jax.algorithms.batch_advantages import add_advantages, mismatch_of_batch
from manus_jax.algorithms.kl import AdaptiveKL, FixedKL, KLController
from manus_jax.algorithms.recipes import Recipe
from manus_jax.config.settings import AlgorithmSettings, TrainSettings
from manus_jax.data_proto import DataProto
from manus_jax.errors import Stopped
from manus_jax.learner.learner import BaseReference, Learner, Reference
from manus_jax.learner.packing import add_packing
from manus_jax.models.adapter_files import Adaptation
from manus_jax.rollout.batch import RewardAllocation, add_greedy_rewards, to_batch
from manus_jax.rollout.trajectory import Outcome
from manus_jax.status import STATUS
from manus_jax.training.checkpoints import Checkpoints
from manus_jax.training.export import export_policy
from manus_jax.training.failures import (
    FailureBudget,
    first_error,
    refuse_fewer_steps,
    require_updates,
)
from manus_jax.training.job import Job
from manus_jax.training.prefetch import Prefetch
from manus_jax.training.rollouts import Rollouts
from manus_jax.training.run_directory import RunDirectory
from manus_jax.training.run_files import BackgroundFiles, write_episodes, write_report_or_say_why
from manus_jax.training.run_log import RunLog, open_run_log
from manus_jax.training.stopping import stop_requests
from manus_jax.training.timer import Timer, profiled
from manus_jax.training.validation import Validated, Validation, score

Phase = Callable[[str], contextlib.AbstractContextManager[None]]
UpdateMetrics = Callable[[], dict[str, float]]
"""Waits for an update and returns its metrics."""


def make_batch(
    rollouts: Rollouts,
    step: int,
    row_length: int,
    phase: Phase,
    routing: tuple[int, int] | None = None,
) -> tuple[DataProto, list[Outcome]]:
    """On process 0: the episodes of a step as a packed batch, and the outcomes of all its episodes.

    `meta_info` has the metrics of the rollouts and the error of a failed episode. `routing` is that
    of `to_batch`.
    """
    algorithm = rollouts.algorithm
    with phase("gen"):
        groups = rollouts.take(step)
    allocation = RewardAllocation(algorithm.reward_allocation, algorithm.allocation_gamma)
    batch = to_batch(groups.episodes, allocation, routing=routing)
    if rollouts.recipe.needs_greedy_baseline and len(batch):
        with phase("gen_greedy"):
            batch = add_greedy_rewards(batch, rollouts.greedy_rewards(step, groups))
    if len(batch):
        # Mini-batches are whole packed rows, so groups share rows only if there are none.
        by = None if algorithm.mini_batch_size is None else "group_id"
        batch = add_packing(batch, row_length, by)
    batch.meta_info.update(metrics=groups.metrics, error=first_error(groups.outcomes))
    return batch, groups.outcomes


@dataclasses.dataclass
class Step:
    """A step whose updates have been started: its metrics so far, and how to get the others."""

    number: int
    metrics: dict[str, float]
    error: str  # of a failed episode; empty if there is none
    validated: Validated | None = None  # a validation that has ended meanwhile
    actor: list[UpdateMetrics] = dataclasses.field(default_factory=list)
    critic: list[UpdateMetrics] = dataclasses.field(default_factory=list)
    updates: jax.Array | None = None  # of the policy since the start of the run
    finished: bool = False


@dataclasses.dataclass
class Trainer:
    """All parts of a run. `rollouts` is None on processes other than 0."""

    train: TrainSettings
    algorithm: AlgorithmSettings
    recipe: Recipe
    rollouts: Rollouts | None
    policy: Learner
    critic: Learner | None
    reference: Reference | BaseReference | None
    lr: optax.Schedule
    job: Job
    directory: RunDirectory
    checkpoints: Checkpoints
    engine_weights: Callable[[], Any]
    adaptation: Adaptation | None = None
    export_merged: bool = False

    def __post_init__(self) -> None:
        algorithm = self.algorithm
        self.failures = FailureBudget(self.train.max_bad_updates)
        self.kl: KLController = FixedKL(self.recipe.kl_coef)
        if algorithm.kl_controller == "adaptive":
            self.kl = AdaptiveKL(self.recipe.kl_coef, algorithm.target_kl, algorithm.kl_horizon)
        self.validation = Validation(self.rollouts, self.directory, self.job)
        self._ahead = self.train.max_staleness > 0
        self._prefetch = Prefetch(
            lambda step: self._make_batch(step, lambda name: contextlib.nullcontext()),
            self.train.total_steps,
        )
        self._files = BackgroundFiles()

    def step(self, number: int, timer: Timer) -> Step:
        """Runs one step, up to the start of its updates; `finish` waits for them."""
        played: list[Outcome] = []
        batch = self.job.from_primary(lambda: self._next_batch(number, timer, played))
        metrics = batch.meta_info["metrics"] | {"training/global_step": float(number)}
        step = Step(number, metrics, batch.meta_info["error"], batch.meta_info["validated"])
        try:
            if not len(batch):
                if self._ahead:  # more groups may start only after a new version
                    metrics |= self.update_engine(number)
                metrics["training/empty_step"] = 1.0
                return step
            with timer.phase("logp"):
                batch = batch.union(self._old_log_probs(batch, metrics))
            if self.reference is not None:
                with timer.phase("ref"):
                    batch = batch.union(self.policy.forward(batch, "ref_log_probs", self.reference))
            if self.critic is not None:
                with timer.phase("compute_values"):
                    batch = batch.union(self.critic.forward(batch, "values"))
            with timer.phase("adv"):
                batch, advantage_metrics, self.kl = add_advantages(
                    batch, self.recipe, self.kl, self.algorithm.similarity
                )
            metrics |= advantage_metrics
        finally:  # the episodes are written even if a later computation fails
            if self.job.primary:
                self._files.write(write_episodes, self.directory.path, number, played, batch)
        for mini_batch in batch.make_iterator(
            self.algorithm.mini_batch_size,
            by="group_id",
            epochs=self.algorithm.ppo_epochs,
            seed=(self.train.seed, number),
        ):
            if self.critic is not None:
                with timer.phase("update_critic"):
                    step.critic.append(self._update(self.critic, mini_batch))
            if number > self.algorithm.critic_warmup:
                with timer.phase("update_actor"):
                    step.actor.append(self._update(self.policy, mini_batch))
        if step.actor:  # a copy, because the next update donates it
            step.updates = jnp.copy(self.policy.state.step)
        with timer.phase("update_weights"):
            metrics |= self.update_engine(number)
        return step

    def update_engine(self, version: int) -> dict[str, float]:
        """Gives the policy's weights to the engine; returns engine and environment metrics."""
        params = self.engine_weights()

        def update() -> dict[str, float]:
            assert self.rollouts is not None
            self.rollouts.update_weights(params, version)
            metrics = {f"engine/{k}": float(v) for k, v in self.rollouts.engine.metrics().items()}
            counters = self.rollouts.pool.counters()
            return metrics | {f"env_pool/{k}": float(v) for k, v in counters.items()}

        return self.job.on_primary(update) or {}

    def run(self) -> dict[str, float]:
        """Trains to `total_steps` from the newest checkpoint, if any; returns the last metrics."""
        train = self.train
        start = self._restore()
        with (
            stop_requests("stopping after this step; once more stops at once", self.job) as stop,
            open_run_log(train, self.directory, start) as log,
            self._files,
        ):
            if start == 0 and (train.val_before_train or train.val_only):
                with STATUS.phase("testing"):
                    metrics = self.validation.run(0, train.baselines)
                log.step(0, metrics)
                log.validation(0, metrics)
            timer = Timer()
            with timer.phase("report"):
                self._report(log)
            if train.val_only:
                return log.last
            stop.after_step()
            previous: Step | None = None  # a step whose updates are awaited during the next one
            for number in range(start + 1, train.total_steps + 1):
                with profiled(number, train.profile_steps, self.directory.path):
                    step = self.step(number, timer)
                if previous is not None:
                    self.finish(previous, log)
                    log.step(previous.number, previous.metrics)
                self._log_late_validation(step.validated, log)
                last = number == train.total_steps
                testing = last or number % train.test_freq == 0
                if testing or not self._ahead:
                    self.finish(step, log)
                if testing:
                    with timer.phase("testing"):
                        self._validate(step, log)
                step.metrics |= log.costs.metrics()
                stopping = stop.after_step()
                if last or stopping or number % train.save_freq == 0:
                    self.finish(step, log)
                    step.metrics |= timer.metrics()
                    with timer.phase("save_checkpoint"):
                        self._save(number, step.metrics)
                step.metrics |= timer.metrics()
                previous = None if step.finished else step
                if step.finished:
                    log.step(number, step.metrics)
                # The report contains the metrics of this step, so its time counts for the next one.
                timer = Timer()
                if testing or stopping or step.validated:
                    with timer.phase("report"):
                        self._report(log)
                log.show(number)
                if stopping and not last:
                    self._log_late_validation(self.validation.finish(), log)
                    self.checkpoints.wait()
                    raise Stopped.after(number, train.total_steps, stop.exit_code)
        self.checkpoints.wait()
        trained = self.policy
        if self.critic is not None and train.total_steps <= self.algorithm.critic_warmup:
            trained = self.critic
        require_updates(trained.state, train.total_steps)
        return log.last

    def finish(self, step: Step, log: RunLog) -> None:
        """Waits for the updates of a step and adds their metrics; raises if the run must end."""
        if step.finished:
            return
        step.finished, metrics = True, step.metrics
        if "training/empty_step" not in metrics:
            actor = [fetch() for fetch in step.actor]
            critic = [fetch() for fetch in step.critic]
            metrics |= update_metrics(actor, critic)
            self.failures.after_updates("policy", [m["update_skipped"] for m in actor])
            self.failures.after_updates("critic", [m["update_skipped"] for m in critic])
            skipped = sum(m["update_skipped"] for m in (*actor, *critic))
            metrics["training/skipped_updates"] = skipped
            if step.updates is not None:
                metrics["actor/lr"] = float(self.lr(int(step.updates) - 1))
        if warning := self.failures.after_step(metrics, step.error):
            log.warn(step.number, warning)
        log.diagnose(step.number, metrics)

    def export(self) -> None:
        """Writes the final policy, unless it already exists."""
        step, merged = self.train.total_steps, self.export_merged
        export_policy(self.policy, self.adaptation, self.directory, step, self.job, merged)

    def _make_batch(self, step: int, phase: Phase) -> tuple[DataProto, list[Outcome]]:
        assert self.rollouts is not None
        spec = self.policy.spec
        return make_batch(self.rollouts, step, spec.row_shape.length, phase, spec.routing)

    def _next_batch(self, step: int, timer: Timer, played: list[Outcome]) -> DataProto:
        """On process 0: the batch of a step; appends the outcomes of its episodes to `played`."""
        began = time.monotonic()
        if self._ahead:
            with timer.phase("gen"):
                batch, outcomes = self._prefetch.next(step)
        else:
            batch, outcomes = self._make_batch(step, timer.phase)
        batch.meta_info["metrics"]["timing_s/idle_learner"] = time.monotonic() - began
        played += outcomes
        batch.meta_info["validated"] = self.validation.ended(wait=False)
        return batch

    def _old_log_probs(self, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        """The column `old_log_probs`; adds how far the sampler's differ to `metrics`."""
        sampler = np.asarray(batch.batch["sampler_log_probs"])
        if self.algorithm.old_log_probs == "bypass":
            return DataProto.from_dict({"old_log_probs": sampler})
        old = self.policy.forward(batch, "old_log_probs")
        mismatch = mismatch_of_batch(batch, np.asarray(old.batch["old_log_probs"]))
        metrics |= {f"mismatch/{name}": value for name, value in mismatch.items()}
        return old

    def _update(self, learner: Learner, batch: DataProto) -> UpdateMetrics:
        """Starts an update; a synchronous run also waits for it."""
        fetch = learner.start_update(batch)
        if self._ahead:
            return fetch
        metrics = fetch()
        return lambda: metrics

    def _validate(self, step: Step, log: RunLog) -> None:
        """Validates after a step; an asynchronous run only starts it, unless the step is the last.

        The validation before it is finished first.
        """
        self._log_late_validation(self.validation.finish(), log)
        if self._ahead and step.number < self.train.total_steps:
            self.validation.start(step.number)
        else:
            step.metrics |= self.validation.run(step.number)
            log.validation(step.number, step.metrics)

    def _log_late_validation(self, validated: Validated | None, log: RunLog) -> None:
        """Adds the metrics of a validation to those of the earlier step at which it started."""
        if validated is not None:
            number, metrics = validated
            log.amend(number, metrics)
            if (rated := score(metrics)) is not None:
                self.checkpoints.add_score(number, rated)
            log.validation(number, metrics)

    def _report(self, log: RunLog) -> None:
        if self.job.primary:
            self.directory.flush_metrics()
            self._files.write(write_report_or_say_why, self.directory.path, log.line)

    @functools.cached_property
    def _learners(self) -> dict[str, Learner]:
        learners = {"policy": self.policy}
        return learners if self.critic is None else {**learners, "critic": self.critic}

    def _save(self, step: int, metrics: dict[str, float]) -> None:
        self._files.wait()
        host = {
            "rollouts": self.rollouts.state(step) if self.rollouts is not None else {},
            "kl_controller": {"coef": self.kl.coef},
            "metrics": metrics,  # the run may be killed before they are appended to metrics.jsonl
        }
        states = {name: learner.state for name, learner in self._learners.items()}
        self.directory.flush_metrics()
        self.checkpoints.save(step, states, host, score(metrics))

    def _restore(self) -> int:
        """Continues from the newest checkpoint; returns its step, 0 if there is none."""
        start = self.checkpoints.latest() or 0
        refuse_fewer_steps(start, "train.total_steps", self.train.total_steps)
        if start:
            abstract = {name: x.abstract_state() for name, x in self._learners.items()}
            states, host = self.checkpoints.restore(start, abstract)
            for name, learner in self._learners.items():
                learner.state = states[name]
            self.kl = dataclasses.replace(self.kl, coef=host["kl_controller"]["coef"])
            if self.rollouts is not None:
                self.rollouts.restore(host["rollouts"], start)
            self.update_engine(start)
            if self.rollouts is not None:  # no episode starts with the weights of step 0
                self.rollouts.wait_published()
        self.directory.forget_metrics_after(start or -1)
        if start and all(line["step"] != start for line in self.directory.metrics()):
            self.directory.append_metrics({"step": start, **host["metrics"]})
        if start and self._ahead:
            self.validation.repeat(start)
        return start


def update_metrics(
    actor: Sequence[Mapping[str, float]], critic: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Metric means over the updates of a step."""
    metrics = {}
    for prefix, updates in (("actor", actor), ("critic", critic)):
        for name in updates[0] if updates else ():
            mean = float(np.mean([update[name] for update in updates]))
            if "/" not in name:
                metrics[f"{prefix}/{name}"] = mean
            elif prefix == "actor":
                metrics[name] = mean
    return metrics

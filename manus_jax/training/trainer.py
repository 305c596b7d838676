"""The training loop: rollouts, advantages, updates, new weights.

Each step plays `batch_size` tasks `group_size` times with the current weights, turns the episodes
into per-token advantages, updates the policy (and the critic), and gives the new weights to the
engine as a new version. The recipe determines the algorithm; the loop is independent of it.
Everything that determines the next step is in the checkpoint: states, task cursor, KL controller.
Random numbers are derived from the seed and the step, so a resumed run neither repeats nor skips
any.

Every process of a job runs this loop on the same batch. Process 0 also runs the rollouts and writes
the run directory.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import optax
from rich.markup import escape

from manus_jax.algorithms.batch_advantages import add_advantages
from manus_jax.algorithms.corrections import mismatch_metrics
from manus_jax.algorithms.kl import AdaptiveKL, FixedKL, KLController
from manus_jax.algorithms.recipes import Recipe
from manus_jax.config.settings import AlgorithmSettings, TrainSettings
from manus_jax.data_proto import DataProto
from manus_jax.errors import Stopped
from manus_jax.learner.learner import Learner, Reference
from manus_jax.learner.packing import add_packing
from manus_jax.learner.update import require_finite
from manus_jax.models.huggingface import ModelCard, is_complete, save_hf
from manus_jax.progress import ProgressLine
from manus_jax.reporting.page import write_report
from manus_jax.rollout.batch import RewardAllocation, to_batch
from manus_jax.rollout.trajectory import Outcome
from manus_jax.rollout.trajectory_files import write_trajectories
from manus_jax.status import STATUS
from manus_jax.training.checkpoints import Checkpoints
from manus_jax.training.failures import (
    FailureBudget,
    first_error,
    refuse_fewer_steps,
    require_updates,
)
from manus_jax.training.job import Job
from manus_jax.training.metric_sinks import open_sinks
from manus_jax.training.rollouts import Rollouts
from manus_jax.training.run_directory import RunDirectory
from manus_jax.training.run_summary import validation_file
from manus_jax.training.stopping import stop_requests
from manus_jax.training.timer import Timer
from manus_jax.weights.host_tensors import gather_to_host


@dataclasses.dataclass
class Trainer:
    """All parts of a run. `rollouts` is None on processes other than 0."""

    train: TrainSettings
    algorithm: AlgorithmSettings
    recipe: Recipe
    rollouts: Rollouts | None
    policy: Learner
    critic: Learner | None
    reference: Reference | None
    lr: optax.Schedule
    job: Job
    directory: RunDirectory
    checkpoints: Checkpoints

    def __post_init__(self) -> None:
        algorithm = self.algorithm
        self.failures = FailureBudget(self.train.max_bad_updates)
        self.allocation = RewardAllocation(algorithm.reward_allocation, algorithm.allocation_gamma)
        self.kl: KLController = FixedKL(self.recipe.kl_coef)
        if algorithm.kl_controller == "adaptive":
            self.kl = AdaptiveKL(self.recipe.kl_coef, algorithm.target_kl, algorithm.kl_horizon)

    def step(self, step: int, timer: Timer) -> tuple[dict[str, float], str]:
        """Runs one step; returns its metrics, and the error of a failed episode, if any."""
        played: list[Outcome] = []
        batch = self.job.from_primary(lambda: self._play(step, timer, played))
        metrics = dict(batch.meta_info["metrics"])
        error = batch.meta_info["error"]
        try:
            if not len(batch):
                return metrics | {"training/empty_step": 1.0}, error
            mini_batches = self.algorithm.mini_batch_size is not None
            batch = add_packing(
                batch, self.policy.spec.row_shape.length, by="group_id" if mini_batches else None
            )
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
                directory = self.directory.path / "trajectories"
                write_trajectories(directory, step, played, _advantages_by_uid(batch))
        actor, critic = [], []
        for mini_batch in batch.make_iterator(
            self.algorithm.mini_batch_size,
            by="group_id",
            epochs=self.algorithm.ppo_epochs,
            seed=(self.train.seed, step),
        ):
            if self.critic is not None:
                with timer.phase("update_critic"):
                    critic.append(self.critic.update(mini_batch))
            if step > self.algorithm.critic_warmup:
                with timer.phase("update_actor"):
                    actor.append(self.policy.update(mini_batch))
        metrics |= update_metrics(actor, critic)
        self.failures.after_updates("policy", [m["update_skipped"] for m in actor])
        self.failures.after_updates("critic", [m["update_skipped"] for m in critic])
        metrics["training/skipped_updates"] = sum(m["update_skipped"] for m in (*actor, *critic))
        if actor:
            metrics["actor/lr"] = float(self.lr(int(self.policy.state.step) - 1))
        with timer.phase("update_weights"):
            metrics |= self.update_engine(step)
        return metrics, error

    def run(self) -> dict[str, float]:
        """Trains to `total_steps` from the newest checkpoint, if any; returns the last metrics."""
        train = self.train
        start = self._restore()
        last: dict[str, float] = {}
        with (
            self.directory.flushing_metrics(),
            stop_requests("stopping after this step; once more stops at once", self.job) as stop,
            ProgressLine("train", train.total_steps, start) as line,
            open_sinks(train, self.directory, start) as log,
        ):
            if start:
                line.say(f"resumed at step {start}")
            if start == 0 and (train.val_before_train or train.val_only):
                with STATUS.phase("testing"):
                    last |= self._validate(0, train.baselines)
                self.directory.append_metrics({"step": 0, **last})
                log(0, last)
                line.say(_validation_line(0, last))
            timer = Timer()
            with timer.phase("report"):
                self._report(line)
            if train.val_only:
                return last
            stop.after_step()
            for step in range(start + 1, train.total_steps + 1):
                with self._profiled(step):
                    metrics, error = self.step(step, timer)
                metrics["training/global_step"] = float(step)
                if warning := self.failures.after_step(metrics, error):
                    line.say(escape(f"step {step}: {warning}"))
                testing = step % train.test_freq == 0 or step == train.total_steps
                if testing:
                    with timer.phase("testing"):
                        metrics |= self._validate(step)
                    line.say(_validation_line(step, metrics))
                stopping = stop.after_step()
                if step % train.save_freq == 0 or step == train.total_steps or stopping:
                    metrics |= timer.metrics()
                    with timer.phase("save_checkpoint"):
                        self._save(step, metrics)
                metrics |= timer.metrics()
                self.directory.append_metrics({"step": step, **metrics})
                log(step, metrics)
                last |= metrics
                # The report contains the metrics of this step, so its time counts for the next one.
                timer = Timer()
                if testing or stopping:
                    with timer.phase("report"):
                        self._report(line)
                shown = ("critic/score/mean", "episode/success_rate", "actor/pg_loss")
                line.update(step, {name.split("/")[1]: metrics.get(name, 0.0) for name in shown})
                if stopping and step < train.total_steps:
                    self.checkpoints.wait()
                    raise Stopped.after(step, train.total_steps, stop.exit_code)
        self.checkpoints.wait()
        trained = self.policy
        if self.critic is not None and train.total_steps <= self.algorithm.critic_warmup:
            trained = self.critic
        require_updates(trained.state, train.total_steps)
        return last

    def export(self) -> None:
        """Writes the final policy as a Hugging Face directory, unless it already exists."""
        export = self.directory.export(self.train.total_steps)
        if not is_complete(export):
            require_finite(self.policy.state.params, "the trained model")
            params = gather_to_host(self.policy.state.params, self.job.primary)
            card = ModelCard.load(self.directory.model)
            self.job.on_primary(lambda: save_hf(params, card, export))

    def update_engine(self, version: int) -> dict[str, float]:
        """Sends the policy's weights to the engine; returns engine and environment metrics."""
        params = gather_to_host(self.policy.state.params, self.job.primary)

        def update() -> dict[str, float]:
            assert self.rollouts is not None
            self.rollouts.publish(params, version)
            metrics = {f"engine/{k}": float(v) for k, v in self.rollouts.engine.metrics().items()}
            counters = self.rollouts.pool.counters()
            return metrics | {f"env_pool/{k}": float(v) for k, v in counters.items()}

        return self.job.on_primary(update) or {}

    def _play(self, step: int, timer: Timer, played: list[Outcome]) -> DataProto:
        """On process 0: the batch of a step, with metrics; appends all outcomes to `played`."""
        assert self.rollouts is not None
        with timer.phase("gen"):
            groups = self.rollouts.take(step)
        played += groups.outcomes
        batch = to_batch(groups.episodes, self.allocation)
        batch.meta_info["metrics"] = groups.metrics
        batch.meta_info["error"] = first_error(groups.outcomes)
        if self.recipe.needs_greedy_baseline and groups.episodes:
            with timer.phase("gen_greedy"):
                greedy = self.rollouts.greedy_rewards(step, groups)
            host = batch.non_tensor_batch
            # If the greedy episode failed, the baseline is the episode's own reward.
            rewards = [
                greedy.get(group, own)
                for group, own in zip(host["group_id"], host["episode_reward"], strict=True)
            ]
            column = {"greedy_rewards": np.array(rewards, np.float32)}
            batch = batch.union(DataProto.from_dict(column))
        return batch

    def _old_log_probs(self, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        sampler = np.asarray(batch.batch["sampler_log_probs"])
        if self.algorithm.old_log_probs == "bypass":
            return DataProto.from_dict({"old_log_probs": sampler})
        old = self.policy.forward(batch, "old_log_probs")
        real = np.asarray(batch.batch["attention_mask"])
        column = lambda x: np.asarray(x)[real]
        mismatch = mismatch_metrics(
            column(old.batch["old_log_probs"]), column(sampler), column(batch.batch["loss_mask"])
        )
        metrics |= {f"mismatch/{name}": float(value) for name, value in mismatch.items()}
        return old

    def _validate(self, step: int, baselines: Sequence[str] = ()) -> dict[str, float]:
        def validate() -> DataProto:
            assert self.rollouts is not None
            self.rollouts.wait_published()
            metrics: dict[str, float] = {}
            for name in baselines:
                baseline = self.rollouts.evaluate(name)
                baseline.check_played(f"validation with {name}")
                metrics |= baseline.metrics(f"val_{name}")
            result = self.rollouts.evaluate("val")
            directory = self.directory.path / "trajectories"
            write_trajectories(directory, validation_file(step), result.outcomes)
            result.check_played(f"validation at step {step}")
            return DataProto.empty({"metrics": metrics | result.metrics()})

        return self.job.from_primary(validate).meta_info["metrics"]

    @contextlib.contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        """Writes a trace of the block if the step is one of `train.profile_steps`."""
        if step not in self.train.profile_steps:
            yield
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a rollout makes too many calls
        folder = self.directory.path / "profile" / str(step)
        with (
            jax.profiler.trace(folder, create_perfetto_trace=True, profiler_options=options),
            jax.profiler.StepTraceAnnotation("train", step_num=step),
        ):
            yield

    def _report(self, line: ProgressLine) -> None:
        if self.job.primary:
            self.directory.flush_metrics()
            write_report_or_say_why(self.directory.path, line)

    @functools.cached_property
    def _learners(self) -> dict[str, Learner]:
        learners = {"policy": self.policy}
        return learners if self.critic is None else {**learners, "critic": self.critic}

    def _save(self, step: int, metrics: dict[str, float]) -> None:
        rates = [v for k, v in metrics.items() if k.startswith("val/") and k.endswith("/score")]
        host = {
            "rollouts": self.rollouts.state() if self.rollouts is not None else {},
            "kl_controller": {"coef": self.kl.coef},
            "metrics": metrics,  # the run may be killed before they are appended to metrics.jsonl
        }
        states = {name: learner.state for name, learner in self._learners.items()}
        self.directory.flush_metrics()
        self.checkpoints.save(step, states, host, float(np.mean(rates)) if rates else None)

    def _restore(self) -> int:
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
        self.directory.forget_metrics_after(start or -1)
        if start and all(line["step"] != start for line in self.directory.metrics()):
            self.directory.append_metrics({"step": start, **host["metrics"]})
        return start


def write_report_or_say_why(run: Path, line: ProgressLine) -> None:
    """Writes report.html; whatever is wrong with the page, training continues."""
    try:
        write_report(run)
    except Exception as error:
        line.say(escape(f"report.html was not written: {type(error).__name__}: {error}"))


def _advantages_by_uid(batch: DataProto) -> dict[str, list[np.ndarray]]:
    """The advantages of each segment's tokens, [T], by episode."""
    found: dict[str, list[np.ndarray]] = {}
    if "advantages" in batch.batch:
        lengths = np.asarray(batch.batch["attention_mask"]).sum(1)
        rows = zip(batch.non_tensor_batch["uid"], batch.batch["advantages"], lengths, strict=True)
        for uid, advantages, length in rows:
            found.setdefault(uid, []).append(np.asarray(advantages)[:length])
    return found


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


def _validation_line(step: int, metrics: Mapping[str, float]) -> str:
    shown = [
        f"{name.removeprefix('val/')} {value:.3f}"
        for name, value in metrics.items()
        if name.startswith("val/") and name.endswith(("/success_rate", "/score"))
    ]
    if failed := metrics["val/failed"]:
        shown.append(f"{failed:.0f} episodes were dropped")
    return f"validation at step {step}: " + ", ".join(shown)

"""Supervised fine-tuning on agent conversations, with the same learner as RL training.

Conversations become exact tokens through the model's own chat template, with loss on the
assistant's turns only; each update packs a batch of them. Everything that determines the next
update is in the checkpoint, so a killed run resumes with identical updates.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optax

from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import SftConfig
from manus_jax.config.settings import DataSettings, SftSettings
from manus_jax.data.chat import CHATML, ChatStream, EncodedConversation
from manus_jax.data.chat_template import template_arguments
from manus_jax.data.mixture import Mixture
from manus_jax.data_proto import DataProto
from manus_jax.errors import Stopped
from manus_jax.learner import objectives
from manus_jax.learner.learner import Learner, LearnerSpec
from manus_jax.learner.mesh import check_model
from manus_jax.learner.optimizer import learning_rate, make_optimizer
from manus_jax.learner.packing import PackingError, RowShape
from manus_jax.models import loading
from manus_jax.models.architecture import Architecture
from manus_jax.models.loading import PolicySource
from manus_jax.models.lora import make_lora
from manus_jax.models.transformer import Compute, Transformer, abstract_model
from manus_jax.progress import ProgressLine
from manus_jax.status import STATUS
from manus_jax.training.checkpoints import Checkpoints
from manus_jax.training.export import describe_adapters, export_policy
from manus_jax.training.failures import FailureBudget, refuse_fewer_steps, require_updates
from manus_jax.training.job import Job
from manus_jax.training.learner_specs import check_experts, check_memory, open_mesh, split_shapes
from manus_jax.training.policies import make_learner
from manus_jax.training.run_directory import RunDirectory
from manus_jax.training.sft_data import (
    Encoder,
    conversation_batch,
    fit,
    read_conversations,
    unigram_entropy,
)
from manus_jax.training.stopping import stop_requests


def run(
    config: SftConfig, operative_config: str, job: Job, devices: Sequence[Any] | None = None
) -> dict[str, float]:
    """Trains to `sft.total_steps` from the newest checkpoint, if any; returns the last metrics.

    `devices` None: all of them.
    """
    sft, data = config.sft, config.data
    mesh, compute = open_mesh(config.mesh, config.compute, data, devices)
    kernel = compute.kernel.implementation
    sources, held_out = read_conversations(data)
    source = loading.from_path(Path(config.model.path)) if config.model.path else None
    if source is None:
        template_arguments(CHATML, config.chat)
        if config.lora.rank is not None:
            raise ConfigError("lora.rank is set and model.path is not: adapters need a model")
    else:
        ChatStream(source.tokenizer, config.chat)
        check_experts(config.model, source.card.architecture)
        make_lora(config.lora, source.card.architecture)  # raises for an unknown target
    if config.scratch is not None:
        arch = loading.scratch_architecture(config.scratch)
        check_experts(config.model, arch)
        check_model(arch, mesh, kernel)
        check_memory(arch, data, mesh)
    opened = job.on_primary(lambda: RunDirectory(sft.run_dir, operative_config))
    directory = opened or RunDirectory(sft.run_dir, "")
    if source is None:
        messages = (m for _, tasks, _ in sources for t in tasks for m in t.messages)
        if config.scratch is not None and config.scratch.tokens == "phrases":
            texts = (f"{message.role}\n{message.content}" for message in messages)
        else:
            texts = (message.content for message in messages)
        source = _from_scratch(config, texts, directory, job)
    source = job.on_primary(lambda s=source: s.keep_card(directory.model)) or source  # type: ignore[misc]
    card = source.card
    check_model(card.architecture, mesh, kernel)
    spec, lr = _spec(config, card.architecture, compute)
    name = f"the model {config.model.path or 'from scratch'}"
    learner = make_learner(source, spec, mesh, sft.seed, name)
    adaptation = describe_adapters(learner, Path(config.model.path or "."), directory)
    stream = ChatStream(source.tokenizer, config.chat)
    encode = Encoder(stream, sft.loss_on)
    held_out_kept = fit(Encoder(stream)(held_out), data.max_length, data.overlong)[0]
    if held_out and not held_out_kept:
        raise _too_long(len(held_out), "held-out conversations", data)
    checkpoints = Checkpoints(
        directory.checkpoints,
        keep=sft.keep_checkpoints,
        strict=sft.strict_resume,
        job=job,
        adaptation=adaptation,
    )
    mixture = Mixture(sources, sft.seed)
    trainer = SftTrainer(
        sft, data, learner, lr, mixture, encode, held_out_kept, checkpoints, directory, job
    )
    last = trainer.run(
        f"{card.architecture.num_params:,} parameters, {len(held_out)} held-out and "
        f"{sum(len(t) for _, t, _ in sources)} train conversations, run {directory.path}"
    )
    checkpoints.close()
    job.await_primary()  # which completes the checkpoint that others may read next
    require_updates(learner.state, sft.total_steps)
    if sft.export:
        merged = config.lora.export_merged
        export_policy(learner, adaptation, directory, sft.total_steps, job, merged)
    return last


def _spec(
    config: SftConfig, arch: Architecture, compute: Compute
) -> tuple[LearnerSpec, optax.Schedule]:
    """The learner of a run and its learning rate by update."""
    sft, data, opt = config.sft, config.data, config.optimizer
    lora = make_lora(config.lora, arch)
    graphdef, all_shapes = abstract_model(Transformer, arch, compute, lora)
    shapes, frozen_shapes = split_shapes(all_shapes, lora, config.compute.dtype)
    lr = learning_rate(opt.lr, opt.schedule, opt.warmup_steps, sft.total_steps, opt.min_lr_ratio)
    micro_batches = -(-sft.batch_size // data.rows)
    spec = LearnerSpec(
        shapes,
        objectives.supervised(graphdef, config.model.load_balancing),
        lambda p, batch: objectives.log_probs_of(graphdef, p, batch)[0],
        make_optimizer(lr, opt),
        (),
        RowShape(data.rows, data.max_length),
        micro_batches,
        micro_batches,
        optimizer_on_host=opt.state == "host",
        in_place=config.compute.remat == "in_place",
        frozen=frozen_shapes,
        lora=lora,
    )
    return spec, lr


@dataclasses.dataclass
class SftTrainer:
    """All parts of a run; `held_out` are the conversations to validate on."""

    sft: SftSettings
    data: DataSettings
    learner: Learner
    lr: optax.Schedule
    mixture: Mixture
    encode: Encoder
    held_out: Sequence[EncodedConversation]
    checkpoints: Checkpoints
    directory: RunDirectory
    job: Job

    def run(self, description: str) -> dict[str, float]:
        """Trains to `total_steps`; prints the description first and returns the last metrics."""
        sft = self.sft
        start = self._restore()
        validate = _validation(self.learner, self.held_out, sft.batch_size, self.data.max_length)
        unigram = {"val/unigram_entropy": unigram_entropy(self.held_out)} if self.held_out else {}
        last: dict[str, float] = dict(unigram)
        failures = FailureBudget(sft.max_bad_updates)
        with (
            self.directory.flushing_metrics(),
            stop_requests("stopping after this update; once more stops at once", self.job) as stop,
            ProgressLine("sft", sft.total_steps, start) as line,
        ):
            line.say(description + (f", resumed at step {start}" if start else ""))
            if self.held_out and start == 0:
                last |= validate()
                self.directory.append_metrics({"step": 0, **last})
            upcoming = self._next_batch() if start < sft.total_steps else None
            for step in range(start + 1, sft.total_steps + 1):
                began = time.monotonic()
                assert upcoming is not None
                batch, counts, cursor = upcoming
                finish = self.learner.start_update(batch)
                # The next batch is tokenized and packed while the device computes.
                upcoming = self._next_batch() if step < sft.total_steps else None
                means = finish()
                failures.after_updates("model", [means["update_skipped"]])
                if means["update_skipped"]:
                    line.say(f"update {step} was not finite and has been skipped")
                metrics = self._metrics(step, means, time.monotonic() - began) | counts
                if self.held_out and (step % sft.test_freq == 0 or step == sft.total_steps):
                    metrics |= validate() | unigram
                self.directory.append_metrics({"step": step, **metrics})
                STATUS.count(tokens=int(means["packing/tokens"]))
                last |= metrics
                stopping = stop.after_step()
                if step % sft.save_freq == 0 or step == sft.total_steps or stopping:
                    self.directory.flush_metrics()
                    self.checkpoints.save(step, {"policy": self.learner.state}, {"mixture": cursor})
                shown = {"loss": last["train/loss"], "tokens/s": last["perf/tokens_per_s"]}
                if "val/loss" in last:
                    shown["val loss"] = last["val/loss"]
                line.update(step, shown)
                if stopping and step < sft.total_steps:
                    self.checkpoints.close()
                    raise Stopped.after(step, sft.total_steps, stop.exit_code)
        return last

    def _restore(self) -> int:
        """Continues from the newest checkpoint; returns its step, 0 if there is none."""
        start = self.checkpoints.latest() or 0
        refuse_fewer_steps(start, "sft.total_steps", self.sft.total_steps)
        if start:
            abstract = {"policy": self.learner.abstract_state()}
            states, host = self.checkpoints.restore(start, abstract)
            self.learner.state = states["policy"]
            self.mixture.restore(host["mixture"])
        self.directory.forget_metrics_after(start or -1)
        return start

    def _next_batch(self) -> tuple[DataProto, dict[str, float], dict[str, Any]]:
        """The next batch, its counts, and the cursor after it."""
        tasks = self.mixture.next_batch(self.sft.batch_size)
        sequences = self.encode(tasks)
        batch, counts = _fitted_batch(sequences, self.data)
        counts["packing/sequences_per_conversation"] = len(sequences) / len(tasks)
        return batch, counts, self.mixture.state()

    def _metrics(self, step: int, means: dict[str, float], seconds: float) -> dict[str, float]:
        return {
            "train/loss": means["nll"],
            "train/grad_norm": means["grad_norm"],
            "train/update_skipped": means["update_skipped"],
            "train/tokens": means[objectives.TOKENS],
            "train/lr": float(self.lr(step - 1)),
            "timing_s/step": seconds,
            "perf/tokens_per_s": means["packing/tokens"] / seconds,
            **{name: value for name, value in means.items() if name.startswith("packing/")},
        }


def _from_scratch(config: SftConfig, texts: Any, directory: RunDirectory, job: Job) -> PolicySource:
    """A new model; process 0 trains the tokenizer, and the other processes read it."""
    scratch = config.scratch
    assert scratch is not None
    make = lambda: loading.from_scratch(scratch, texts, config.sft.seed, directory.model)
    return job.on_primary(make) or make()


def _fitted_batch(
    conversations: Sequence[EncodedConversation], data: DataSettings
) -> tuple[DataProto, dict[str, float]]:
    """The batch of an update, and how many conversations were cut or dropped."""
    kept, counts = fit(conversations, data.max_length, data.overlong)
    if not kept:
        raise _too_long(len(conversations), "conversations of a batch", data)
    return conversation_batch(kept, data.max_length), counts


def _too_long(count: int, what: str, data: DataSettings) -> PackingError:
    if data.overlong == "cut":
        problem = f"in all {count} {what}, the first answer ends after data.max_length"
        remedy = ""
    else:
        problem = f"all {count} {what} are longer than data.max_length"
        remedy = ", or choose data.overlong = 'cut'"
    return PackingError(f"{problem} = {data.max_length}; raise it{remedy}")


def _validation(
    learner: Learner, held_out: Sequence[EncodedConversation], size: int, length: int
) -> Callable[[], dict[str, float]]:
    """A function that returns the loss of the learner on the held-out conversations."""
    batches = [
        conversation_batch(held_out[i : i + size], length) for i in range(0, len(held_out), size)
    ]

    def validate() -> dict[str, float]:
        sums = [learner.evaluate(batch) for batch in batches]
        total = {name: sum(s[name] for s in sums) for name in sums[0]}
        loss = total["nll"] / total[objectives.TOKENS]
        return {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0))}

    return validate

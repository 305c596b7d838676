"""Supervised fine-tuning on agent trajectories: the learner's first program.

Conversations become exact tokens through the model's own chat template, with loss on the
assistant's turns only; each update packs a batch of them. Everything that decides the next update
is in the checkpoint, so a killed run goes on as if nothing had happened.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from manus_jax.config.commands import SftConfig
from manus_jax.config.settings import ComputeSettings, DataSettings
from manus_jax.data.chat import ChatStream, ConversationError
from manus_jax.data.tasks import DatasetError, Mixture, Task, read_tasks, without
from manus_jax.learner import objectives
from manus_jax.learner.mesh import check_batch, check_model, make_mesh, param_shardings
from manus_jax.learner.optimizer import adamw, learning_rate
from manus_jax.learner.packing import Layout, Packed, PackingError, Sample, fit, pack
from manus_jax.learner.packing import with_loss_weights as weigh
from manus_jax.learner.update import (
    TrainState,
    init_state,
    make_evaluate,
    make_update,
    put_batch,
    state_shardings,
)
from manus_jax.models import huggingface
from manus_jax.models import loading as policy_source
from manus_jax.models.attention import AttentionKernel, pick_implementation
from manus_jax.models.transformer import Compute, Transformer, abstract_model
from manus_jax.training.checkpoints import Checkpoints, abstract_state
from manus_jax.training.progress import ProgressLine
from manus_jax.training.run_directory import RunDirectory


class Encoder:
    """Tasks to samples, each conversation tokenized once."""

    def __init__(self, stream: ChatStream):
        self._stream = stream
        self._cache: dict[int, Sample] = {}

    def __call__(self, task: Task) -> Sample:
        key = id(task)
        if key not in self._cache:
            encoded = self._stream.encode(task.messages, task.item_id)
            ends = tuple(end + 1 for end in encoded.turn_ends)
            self._cache[key] = Sample(encoded.input_ids, encoded.loss_mask, turn_ends=ends)
        return self._cache[key]


def read_conversations(
    data: DataSettings,
) -> tuple[list[tuple[str, list[Task], float]], list[Task]]:
    """Weighted train sources, less what is held out, and the held-out conversations."""
    if not data.train_files:
        raise DatasetError("data.train_files names no file of conversations to learn from")
    held_out = read_tasks(data.val_files, needs="conversation") if data.val_files else []
    sources = []
    for index, path in enumerate(data.train_files):
        tasks = without(read_tasks(path, needs="conversation"), held_out)
        weight = data.train_weights[index] if data.train_weights else float(max(1, len(tasks)))
        # Not the folder: the order of the data must not depend on where it lies.
        sources.append((f"{index}:{Path(path).name}", tasks, weight))
    for task in (t for tasks in (*(s[1] for s in sources), held_out) for t in tasks):
        if not any(m.train for m in task.messages):
            raise ConversationError(f"{task.item_id} has no assistant turn to train on")
    return sources, held_out


def make_compute(settings: ComputeSettings, mesh: jax.sharding.Mesh) -> Compute:
    """The compute options for this mesh; attention "auto" follows its platform."""
    platform = mesh.devices.flat[0].platform
    name = settings.attention if settings.attention != "auto" else pick_implementation(platform)
    return Compute(settings.dtype, settings.remat, AttentionKernel(name, mesh))


def pack_batch(
    samples: Sequence[Sample], data: DataSettings, layout: Layout
) -> tuple[Packed, dict]:
    """One update's batch, with the counts of what was cut or dropped."""
    kept, counts = fit(samples, data.max_length, data.overlong)
    if not kept:
        raise PackingError(
            f"all {len(samples)} conversations of a batch are longer than data.max_length = "
            f"{data.max_length}; raise it, or choose data.overlong = 'cut'"
        )
    packed = pack(weigh(kept, "token-mean"), layout)
    return packed, {**counts, **packed.metrics()}


def unigram_entropy(samples: Sequence[Sample]) -> float:
    """Entropy in nats of the trained tokens' own frequencies: what a model without context pays."""
    tokens = np.concatenate([s.input_ids[s.loss_mask] for s in samples])
    p = np.bincount(tokens) / len(tokens)
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def run(config: SftConfig, operative_config: str) -> dict[str, float]:
    """Trains to `sft.total_steps`, from the newest checkpoint if there is one; final metrics."""
    sft, data = config.sft, config.data
    mesh = make_mesh(**dataclasses.asdict(config.mesh))
    compute = make_compute(config.compute, mesh)
    check_batch(data.rows, data.max_length, mesh, compute.kernel.implementation)
    sources, held_out = read_conversations(data)
    source = policy_source.from_path(Path(config.model.path)) if config.model.path else None
    directory = RunDirectory(sft.run_dir, operative_config)
    if source is None:
        assert config.scratch is not None
        texts = (m.content for _, tasks, _ in sources for t in tasks for m in t.messages)
        source = policy_source.from_scratch(config.scratch, texts, sft.seed, directory.model)
    source = source.keep_card(directory.model)

    check_model(source.card.architecture, mesh, compute.kernel.implementation)
    graphdef, shapes = abstract_model(Transformer, source.card.architecture, compute)
    opt = config.optimizer
    lr = learning_rate(opt.lr, opt.schedule, opt.warmup_steps, sft.total_steps, opt.min_lr_ratio)
    optimizer = adamw(lr, opt.weight_decay, opt.b1, opt.b2, opt.eps, opt.grad_clip)
    objective = objectives.supervised(graphdef)
    update = make_update(objective, optimizer, mesh, shapes)
    evaluate = make_evaluate(objective, mesh, shapes)

    mixture = Mixture(sources, sft.seed)
    checkpoints = Checkpoints(directory.checkpoints, keep=sft.keep_checkpoints)
    start = checkpoints.latest() or 0
    if start:
        shardings = state_shardings(shapes, optimizer, mesh)
        opt_shapes = jax.eval_shape(optimizer.init, shapes)
        counter = jax.ShapeDtypeStruct((), np.int32)
        target = abstract_state(TrainState(shapes, opt_shapes, counter, counter), shardings)
        states, host = checkpoints.restore(start, {"policy": target})
        state = states["policy"]
        mixture.restore(host["mixture"])
    else:
        state = init_state(source.load(param_shardings(shapes, mesh)), optimizer, mesh)
    directory.forget_metrics_after(start or -1)

    encode = Encoder(ChatStream(source.tokenizer))
    layout = Layout.for_batch(sft.batch_size, data.rows, data.max_length)
    val_samples = fit([encode(t) for t in held_out], data.max_length, data.overlong)[0]
    val_batches = [
        pack(weigh(chunk, "token-mean"), layout) for chunk in _chunks(val_samples, sft.batch_size)
    ]

    def validate(params: Any) -> dict[str, float]:
        sums = [jax.device_get(evaluate(params, *put_batch(b, mesh))) for b in val_batches]
        total = {k: sum(float(s[k]) for s in sums) for k in sums[0]}
        loss = total["nll"] / total[objectives.TOKENS]
        return {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0))}

    def next_packed() -> tuple[Packed, dict[str, float], dict[str, Any]]:
        """The next batch and the cursor behind it."""
        samples = [encode(t) for t in mixture.next_batch(sft.batch_size)]
        return *pack_batch(samples, data, layout), mixture.state()

    unigram = {"val/unigram_entropy": unigram_entropy(val_samples)} if val_samples else {}
    last: dict[str, float] = dict(unigram)
    with ProgressLine("sft", sft.total_steps, start) as line:
        line.say(
            f"{source.card.architecture.num_params:,} parameters, {len(held_out)} held-out and "
            f"{sum(len(t) for _, t, _ in sources)} train conversations, run {directory.path}"
            + (f", resumed at step {start}" if start else "")
        )
        if val_batches and start == 0:
            last |= validate(state.params)
            directory.append_metrics({"step": 0, **last})
        upcoming = next_packed() if start < sft.total_steps else None
        for step in range(start + 1, sft.total_steps + 1):
            began = time.monotonic()
            assert upcoming is not None
            packed, packing_metrics, cursor = upcoming
            state, sums = update(state, *put_batch(packed, mesh))
            # The next batch is tokenized and packed while the device works.
            upcoming = next_packed() if step < sft.total_steps else None
            means = objectives.token_means(sums)
            seconds = time.monotonic() - began
            metrics = {
                "train/loss": means["nll"],
                "train/grad_norm": means["grad_norm"],
                "train/update_skipped": means["update_skipped"],
                "train/tokens": means[objectives.TOKENS],
                "train/lr": float(lr(step - 1)),
                "timing_s/step": seconds,
                "perf/tokens_per_s": packing_metrics["packing/tokens"] / seconds,
                **packing_metrics,
            }
            if val_batches and (step % sft.test_freq == 0 or step == sft.total_steps):
                metrics |= validate(state.params) | unigram
            directory.append_metrics({"step": step, **metrics})
            last |= metrics
            if step % sft.save_freq == 0 or step == sft.total_steps:
                checkpoints.save(step, {"policy": state}, {"mixture": cursor})
            shown = {"loss": last["train/loss"], "tokens/s": last["perf/tokens_per_s"]}
            if "val/loss" in last:
                shown["val loss"] = last["val/loss"]
            line.update(step, shown)
    checkpoints.close()
    if sft.export and not directory.export(sft.total_steps).exists():
        directory.export(sft.total_steps).parent.mkdir(exist_ok=True)
        huggingface.save_hf(state.params, source.card, directory.export(sft.total_steps))
    return last


def _chunks(items: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    return (items[i : i + size] for i in range(0, len(items), size))

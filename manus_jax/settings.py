"""Every setting there is, by the gin name that binds it.

Each class is one group of bindings: `OptimizerSettings.lr` is bound by `optimizer.lr = 1e-5`.
A command reads the groups it needs; a binding for any other group is an error.
"""

import dataclasses
from typing import Any, Literal

from manus_jax.config import ConfigError, settings
from manus_jax.learner.packing import Overlong
from manus_jax.models.transformer import REMAT_POLICIES


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@settings("model")
class ModelSettings:
    """Where the policy comes from."""

    path: str | None = None  # a Hugging Face directory or a run directory; None: `scratch`


@settings("scratch")
class ScratchSettings:
    """A small model from scratch, with a tokenizer trained on the data. Nothing is downloaded."""

    family: Literal["qwen2", "qwen3", "llama"] = "qwen3"
    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    tie_embeddings: bool = True


@settings("compute")
class ComputeSettings:
    """How the forward pass is computed; nothing here changes what it computes."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["full", "attention", "minimal", "none"] = "full"
    attention: Literal["auto", "plain", "splash", "triton"] = "auto"  # auto: by the platform

    def __post_init__(self) -> None:
        assert self.remat in REMAT_POLICIES


@settings("mesh")
class MeshSettings:
    """Sizes of the device mesh; -1 takes the devices that are left."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


@settings("optimizer")
class OptimizerSettings:
    lr: float = 1e-6
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0  # of lr, at the end of cosine and linear
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    grad_clip: float = 1.0  # of the global norm

    def __post_init__(self) -> None:
        _require(self.lr > 0, f"optimizer.lr = {self.lr} must be positive")
        _require(self.grad_clip > 0, f"optimizer.grad_clip = {self.grad_clip} must be positive")
        _require(self.warmup_steps >= 0, "optimizer.warmup_steps must not be negative")


@settings("data")
class DataSettings:
    """Which tasks or conversations, and how they are put into rows."""

    train_files: tuple[str, ...] = ()
    val_files: tuple[str, ...] = ()
    train_weights: tuple[float, ...] = ()  # of the train files in the mixture; empty: by size
    max_length: int = 2048  # tokens in a row
    rows: int = 1  # rows in a micro-batch, over all devices
    overlong: Overlong = "cut"  # a sequence longer than a row: error, drop, or cut at a turn's end

    def __post_init__(self) -> None:
        _require(bool(self.train_files), "data.train_files names no file")
        _require(
            not self.train_weights or len(self.train_weights) == len(self.train_files),
            f"data.train_weights has {len(self.train_weights)} numbers for "
            f"{len(self.train_files)} train files",
        )
        _require(self.max_length > 0 and self.rows > 0, "data.max_length, data.rows: at least 1")


@settings("sft")
class SftSettings:
    """Supervised fine-tuning."""

    run_dir: str = ""
    total_steps: int = 100
    batch_size: int = 16  # conversations per update
    seed: int = 0
    save_freq: int = 50  # updates between checkpoints
    test_freq: int = 25  # updates between validations
    keep_checkpoints: int = 2
    export: bool = True  # write export/<step>/, a Hugging Face directory, at the end

    def __post_init__(self) -> None:
        _require(bool(self.run_dir), "sft.run_dir is not set: where shall the run be written?")
        for name in ("total_steps", "batch_size", "save_freq", "test_freq", "keep_checkpoints"):
            _require(getattr(self, name) > 0, f"sft.{name} = {getattr(self, name)}: at least 1")


@settings("env")
class EnvSettings:
    """The environments that are played, and where their servers are."""

    names: tuple[str, ...] = ()
    urls: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Real AgentGym servers, by environment: {"sciworld": ["http://…:36001"]}. An environment
    that is not here is embedded: its servers are started with the program."""
    servers_per_env: int = 1

    def __post_init__(self) -> None:
        _require(bool(self.names), "env.names names no environment, e.g. env.names = ['textcraft']")
        unused = [name for name in self.urls if name not in self.names]
        _require(not unused, f"env.urls has {unused}, which env.names does not")
        _require(self.servers_per_env > 0, "env.servers_per_env: at least 1")


@settings("rollout")
class RolloutGroup:
    """How episodes are played."""

    max_turns: int = 30
    max_tokens_per_turn: int = 256
    max_total_tokens: int = 4096  # of an episode, prompt included
    max_observation_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    memory_turns: int | None = None  # turns kept besides the opening; None: all
    action_format: str = "auto"  # the environment's own, or a name of rollout/actions.py
    prompt_source: Literal["environment", "dataset"] = "environment"
    invalid_action_penalty: float = 0.0
    generation_timeout: float = 600.0
    max_in_flight: int = 1024


@settings("engine")
class EngineSettings:
    """The embedded engine."""

    slots: int = 32  # episodes whose keys and values are kept at once
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_steps: int = 8  # tokens per stream between two looks at the queue

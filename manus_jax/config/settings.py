"""Every setting there is, by the gin name that binds it.

Each class is one group of bindings: `OptimizerSettings.lr` is bound by `optimizer.lr = 1e-5`.
A command reads the groups it needs; a binding for any other group is an error.
"""

import dataclasses
from typing import Any, Literal

from manus_jax.config.binding import ConfigError, settings
from manus_jax.config.server_settings import EnvPoolSettings as EnvPoolSettings
from manus_jax.config.server_settings import VllmSettings as VllmSettings
from manus_jax.learner.packing import Overlong
from manus_jax.models.transformer import REMAT_POLICIES
from manus_jax.rollout.prompts import PromptSource


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
    """Sizes of the device mesh; -1 takes the devices that are left (docs/meshes.md)."""

    data: int = 1  # copies of the model
    fsdp: int = -1  # devices that share one copy
    tensor: int = 1  # devices that split heads, MLP columns and the vocabulary
    sequence: int = 1  # devices that split the tokens of a row
    slices: int | None = None  # parts of "data" joined by DCN; None: as TPU devices tell, else 1


@settings("distributed")
class DistributedSettings:
    """Many processes that are one program, each with devices of its own (docs/multi_host.md)."""

    mode: Literal["auto", "on", "off"] = "auto"  # auto: on where a cluster is found
    coordinator: str | None = None  # host:port of process 0; None: JAX finds it
    processes: int | None = None  # how many there are; None: JAX finds it
    process_id: int | None = None  # which one this is; None: JAX finds it
    connect_s: float = 300.0  # in which all processes must have come together
    heartbeat_s: float = 30.0  # a process that is silent for so long is dead
    together_s: float = 3600.0  # the longest that one thing done together takes, compiling included

    def __post_init__(self) -> None:
        for name in ("connect_s", "heartbeat_s", "together_s"):
            value = getattr(self, name)
            _require(value >= 1, f"distributed.{name} = {value:g}: at least 1")
        number, count = self.process_id, self.processes
        _require(
            number is None or count is None or 0 <= number < count,
            f"distributed.process_id = {number} of distributed.processes = {count}: from 0 to "
            f"{(count or 1) - 1}",
        )


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

    train_files: tuple[str, ...] = ()  # empty: the environments' own training tasks
    val_files: tuple[str, ...] = ()  # empty: the environments' own test tasks
    train_weights: tuple[float, ...] = ()  # of the train files in the mixture; empty: by size
    max_length: int = 2048  # tokens in a row
    rows: int = 1  # rows in a micro-batch, over all devices
    overlong: Overlong = "cut"  # a sequence longer than a row: error, drop, or cut at a turn's end

    def __post_init__(self) -> None:
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
    prompt_source: PromptSource = "environment"  # what an episode opens with
    prompt_examples: int = 1  # of the environment's examples, at most
    invalid_action_penalty: float = 0.0
    generation_timeout: float = 600.0
    max_in_flight: int = 1024


@settings("engine")
class EngineSettings:
    """What generates: the embedded engine ("jax"), vLLM servers ("vllm"), or another registered."""

    name: str = "jax"
    slots: int = 32  # episodes whose keys and values are kept at once
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_steps: int = 8  # tokens per stream between two looks at the queue


@settings("algorithm")
class AlgorithmSettings:
    """What is learned from episodes. None takes the recipe's own value (algorithms/recipes.py)."""

    recipe: str = "grpo"
    gamma: float | None = None
    lam: float | None = None
    normalize_by_std: bool | None = None  # norm_adv_by_std_in_grpo
    step_weight: float | None = None  # gigpo's step_advantage_w
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    entropy_coef: float | None = None
    aggregation: str | None = None  # loss_agg_mode
    norm_constant: float | None = None  # what seq-mean-token-sum-norm divides by
    corrections: tuple[str, ...] | None = None  # names of algorithms/corrections.py
    kl_placement: Literal["none", "reward", "loss"] | None = None
    kl_coef: float | None = None
    kl_estimator: str | None = None
    kl_controller: Literal["fixed", "adaptive"] = "fixed"  # of the KL in the reward
    target_kl: float = 0.1
    kl_horizon: int = 10_000
    reference: Literal["device", "host"] = "device"  # where the reference policy is kept
    dynamic_sampling: bool | None = None  # replace groups whose outcomes are all equal
    max_gen_batches: int = 10  # how often dynamic sampling tries
    similarity: float | None = None  # gigpo: anchors that are this alike count as one; None: equal
    old_log_probs: Literal["recompute", "bypass"] = "recompute"  # bypass: the sampler's own
    ppo_epochs: int = 1
    mini_batch_size: int | None = None  # tasks per update; None: all of a step's
    critic_warmup: int = 0  # steps in which only the critic learns
    cliprange_value: float = 0.5
    critic_lr: float = 1e-5
    reward: str = "env"  # a name of rewards/
    reward_parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    reward_allocation: str = "last_token"
    allocation_gamma: float = 1.0
    on_reward_error: Literal["raise", "drop"] = "raise"

    def __post_init__(self) -> None:
        for name in ("ppo_epochs", "max_gen_batches"):
            _require(getattr(self, name) > 0, f"algorithm.{name}: at least 1")
        size = self.mini_batch_size
        _require(size is None or size > 0, "algorithm.mini_batch_size: at least 1")


@settings("warm_start")
class WarmStartSettings:
    """Supervised fine-tuning on episodes before the first update; 0 steps: none."""

    steps: int = 0
    traces: int = 200  # episodes of training tasks: those that the oracle wins, and
    random_share: float = 0.0  # this share that chance plays, for a model with much to unlearn
    batch_size: int = 16
    lr: float = 1e-3

    def __post_init__(self) -> None:
        share = self.random_share
        _require(0 <= share < 1, f"warm_start.random_share = {share}: from 0 to below 1")


@settings("train")
class TrainSettings:
    """The run."""

    run_dir: str = ""
    total_steps: int = 100
    batch_size: int = 32  # tasks per step
    group_size: int = 8  # episodes per task (rollout.n)
    seed: int = 0
    save_freq: int = 10
    test_freq: int = 10
    keep_checkpoints: int = 2  # the newest; the best one stays too
    val_before_train: bool = True
    val_only: bool = False
    val_tasks: int = 64  # of each environment's test tasks, always the same
    val_temperature: float = 0.0
    yardsticks: tuple[str, ...] = ()  # "oracle", "random": they play the validation tasks once
    max_bad_updates: int = 3  # in a row without a finite gradient, or steps without an episode
    turns_schedule: tuple[int, ...] = ()  # turn limits, one after the other; empty: max_turns
    turns_schedule_steps: int = 100  # how long each of them holds
    tensorboard: bool = False  # event files in run_dir/tensorboard
    wandb_project: str = ""  # empty: nothing goes to wandb
    export: bool = True
    next_command: str = ""  # printed at the end, for a config that leads on to another

    def __post_init__(self) -> None:
        _require(bool(self.run_dir), "train.run_dir is not set: where shall the run be written?")
        positive = ("total_steps", "batch_size", "group_size", "save_freq", "test_freq")
        for name in (*positive, "keep_checkpoints", "val_tasks", "turns_schedule_steps"):
            _require(getattr(self, name) > 0, f"train.{name} = {getattr(self, name)}: at least 1")


@settings("evaluate")
class EvaluateSettings:
    """A fixed panel of tasks, and the policies that play it."""

    policies: tuple[str, ...] = ()
    """"oracle", "random", or a path: a Hugging Face directory, a run, a checkpoint of one."""
    out_dir: str = ""
    tasks_per_env: int = 50  # at most; a larger panel contains the smaller one
    split: Literal["train", "test"] = "test"  # of embedded environments; the others have no splits
    task_files: tuple[str, ...] = ()  # tasks from files, in their order, in place of the split's
    samples: int = 1  # episodes per task: the k of avg@k and pass@k
    seed: int = 0

    def __post_init__(self) -> None:
        kinds = "'oracle', 'random', or the path of a model"
        _require(bool(self.policies), f"evaluate.policies names no policy: a list of {kinds}")
        twice = next((p for p in self.policies if self.policies.count(p) > 1), None)
        _require(twice is None, f"evaluate.policies names {twice!r} twice")
        _require(bool(self.out_dir), "evaluate.out_dir is not set: where shall the results go?")
        for name in ("tasks_per_env", "samples"):
            _require(
                getattr(self, name) > 0, f"evaluate.{name} = {getattr(self, name)}: at least 1"
            )

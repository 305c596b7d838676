"""Every setting, by the gin name that binds it.

Each class is one group of bindings: `OptimizerSettings.lr` is bound by `optimizer.lr = 1e-5`.
`setting(...)` gives the range of a value and says whether it may change when a run is resumed.
`config.commands` says which command reads which groups.
"""

from typing import Any, Literal

from manus_jax.config.binding import ConfigError, setting, settings
from manus_jax.config.server_settings import EnvPoolSettings as EnvPoolSettings
from manus_jax.config.server_settings import VllmSettings as VllmSettings

Overlong = Literal["error", "drop", "cut"]
PromptSource = Literal["environment", "dataset", "observation"]
PromptLayout = Literal["user", "system", "acknowledged"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@settings("model")
class ModelSettings:
    """Where the policy comes from."""

    path: str | None = None  # a Hugging Face directory or a run directory; None: see `scratch`


@settings("scratch")
class ScratchSettings:
    """A small, randomly initialised model with a tokenizer trained on the data."""

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
    """How the forward pass is computed; this does not change its result."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["full", "attention", "minimal", "none"] = "full"
    attention: Literal["auto", "plain", "splash", "triton"] = "auto"  # auto: by platform


@settings("mesh", may_change=True)
class MeshSettings:
    """Sizes of the device mesh; -1 takes the remaining devices (docs/meshes.md)."""

    data: int = 1  # copies of the model
    fsdp: int = -1  # devices that share one copy
    tensor: int = 1  # devices that split heads, MLP columns and the vocabulary
    sequence: int = 1  # devices that split the tokens of a row
    slices: int | None = None  # parts of "data" joined by DCN; None: from the TPU devices, else 1


@settings("distributed", may_change=True)
class DistributedSettings:
    """Training with several processes, each with its own devices (docs/multi_host.md)."""

    mode: Literal["auto", "on", "off"] = "auto"  # auto: on if JAX detects a cluster
    coordinator: str | None = None  # host:port of process 0; None: JAX detects it
    processes: int | None = None  # their number; None: JAX detects it
    process_id: int | None = None  # the number of this process; None: JAX detects it
    connect_s: float = setting(default=300.0, at_least=1)  # until all processes are connected
    heartbeat_s: float = setting(default=30.0, at_least=1)  # a process silent for this long is dead
    timeout_s: float = setting(default=7200.0, at_least=1)  # the longest wait for the others

    def __post_init__(self) -> None:
        number, count = self.process_id, self.processes
        _require(
            number is None or count is None or 0 <= number < count,
            f"distributed.process_id = {number} of distributed.processes = {count}: from 0 to "
            f"{(count or 1) - 1}",
        )


@settings("optimizer")
class OptimizerSettings:
    lr: float = setting(default=1e-6, above=0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = setting(default=0, at_least=0)
    min_lr_ratio: float = 0.0  # of lr, at the end of cosine and linear
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    grad_clip: float = setting(default=1.0, above=0)  # of the global norm


@settings("data")
class DataSettings:
    """The tasks or conversations, and the rows that their tokens are packed into."""

    train_files: tuple[str, ...] = ()  # empty: the environments' own training tasks
    val_files: tuple[str, ...] = ()  # empty: the environments' own test tasks
    train_weights: tuple[float, ...] = ()  # of the train files in the mixture; empty: by size
    max_length: int = setting(default=2048, at_least=1)  # tokens in a row
    rows: int = setting(default=1, at_least=1)  # rows in a micro-batch, over all devices
    overlong: Overlong = "cut"  # sequences longer than a row: error, drop, or cut after a turn

    def __post_init__(self) -> None:
        _require(
            not self.train_weights or len(self.train_weights) == len(self.train_files),
            f"data.train_weights has {len(self.train_weights)} numbers for "
            f"{len(self.train_files)} train files",
        )


@settings("sft")
class SftSettings:
    """Supervised fine-tuning."""

    run_dir: str = setting(default="", may_change=True)
    total_steps: int = setting(default=100, at_least=1, may_change=True)
    batch_size: int = setting(default=16, at_least=1)  # conversations per update
    seed: int = 0
    save_freq: int = setting(default=50, at_least=1, may_change=True)  # updates between checkpoints
    test_freq: int = setting(default=25, at_least=1, may_change=True)  # updates between validations
    keep_checkpoints: int = setting(default=2, at_least=1, may_change=True)
    strict_resume: bool = setting(default=False, may_change=True)  # see train.strict_resume
    export: bool = setting(default=True, may_change=True)  # to export/<step>/, at the end

    def __post_init__(self) -> None:
        _require(bool(self.run_dir), "sft.run_dir is required")


@settings("env")
class EnvSettings:
    """The environments to play, and the addresses of their servers."""

    names: tuple[str, ...] = ()
    urls: dict[str, Any] = setting(factory=dict, may_change=True)
    """AgentGym servers by environment: {"sciworld": ["http://…:36001"]}. The servers of an
    environment without addresses are started by the program."""
    servers_per_env: int = setting(default=1, at_least=1, may_change=True)

    def __post_init__(self) -> None:
        _require(bool(self.names), "env.names is required, e.g. env.names = ['textcraft']")
        unused = [name for name in self.urls if name not in self.names]
        _require(not unused, f"env.urls has {unused}, which env.names does not")


@settings("rollout")
class RolloutSettings:
    """How episodes are played.

    All tokens of an episode, prompt included, stay within `max_total_tokens` and the engine's
    context; a turn is not started with fewer than `min_turn_tokens` left. Longer observations are
    cut in the middle and say so.

    An episode opens with the environment's instruction (`prompt_source` "environment"), with the
    prompt of the dataset row if it has one ("dataset"), or with the first observation only
    ("observation"), for a model fine-tuned on the environment. `prompt_layout` puts the instruction
    and the first observation into one user turn ("user"), the instruction into the system turn
    ("system"), or into a user turn that the assistant acknowledges before the observation
    ("acknowledged"), as in AgentGym's conversations.
    """

    max_turns: int = setting(default=30, at_least=1)
    max_tokens_per_turn: int = setting(default=256, at_least=1)
    max_total_tokens: int = setting(default=4096, at_least=2)
    min_turn_tokens: int = setting(default=16, at_least=1)
    max_observation_tokens: int = setting(default=1024, at_least=1)
    max_observation_chars: int = setting(default=20_000, at_least=1)
    temperature: float = setting(default=1.0, at_least=0)  # 0: greedy
    top_p: float = setting(default=1.0, above=0, at_most=1)
    top_k: int = setting(default=0, at_least=0)  # 0: off
    memory_turns: int | None = setting(default=None, at_least=0)  # that are kept; None: all
    action_format: str = "auto"  # the environment's own, or a name in action_formats.FORMATS
    prompt_source: PromptSource = "environment"
    prompt_layout: PromptLayout = "user"
    prompt_examples: int = setting(default=1, at_least=0)  # of the environment's examples, at most
    invalid_action_penalty: float = setting(
        default=0.0, at_least=0
    )  # per turn without valid action
    generation_timeout: float = setting(default=600.0, above=0)  # seconds per turn
    max_in_flight: int = setting(default=1024, at_least=1)  # episodes played at the same time


@settings("engine")
class EngineSettings:
    """The engine that generates: "jax" (embedded), "vllm" (servers), or another registered one."""

    name: str = "jax"
    slots: int = setting(default=32, at_least=1, may_change=True)  # episodes whose KV cache is kept
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_steps: int = setting(default=8, at_least=1, may_change=True)  # tokens per queue check


@settings("algorithm")
class AlgorithmSettings:
    """The algorithm. None takes the recipe's value (algorithms/recipes.py)."""

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
    norm_constant: float | None = None  # the divisor of seq-mean-token-sum-norm
    corrections: tuple[str, ...] | None = None  # names in algorithms/corrections.py
    kl_placement: Literal["none", "reward", "loss"] | None = None
    kl_coef: float | None = None
    kl_estimator: str | None = None
    kl_controller: Literal["fixed", "adaptive"] = "fixed"  # of the KL in the reward
    target_kl: float = 0.1
    kl_horizon: int = 10_000
    reference: Literal["device", "host"] = "device"  # where the reference policy is kept
    dynamic_sampling: bool | None = None  # replace groups whose outcomes are all equal
    max_gen_batches: int = setting(default=10, at_least=1)  # of dynamic sampling, per step
    similarity: float | None = None  # gigpo: anchors at least this similar are one; None: if equal
    old_log_probs: Literal["recompute", "bypass"] = "recompute"  # bypass: the sampler's own
    ppo_epochs: int = setting(default=1, at_least=1)
    mini_batch_size: int | None = setting(default=None, at_least=1)  # tasks per update; None: all
    critic_warmup: int = 0  # steps in which only the critic is updated
    cliprange_value: float = 0.5
    critic_lr: float = 1e-5
    reward: str = "env"  # a name in rewards.REWARDS
    reward_parameters: dict[str, Any] = setting(factory=dict)
    reward_allocation: str = "last_token"
    allocation_gamma: float = 1.0
    on_reward_error: Literal["raise", "drop"] = "raise"


@settings("warm_start")
class WarmStartSettings:
    """Supervised fine-tuning before the first step, on episodes of the oracle; 0 steps: none."""

    steps: int = setting(default=0, at_least=0)
    traces: int = setting(default=200, at_least=1)  # episodes of training tasks
    random_share: float = setting(default=0.0, at_least=0, below=1)  # by a random policy
    batch_size: int = setting(default=16, at_least=1)
    lr: float = setting(default=1e-3, above=0)


@settings("train")
class TrainSettings:
    """The run."""

    # "{recipe}" and "{env}" are replaced by their names
    run_dir: str = setting(default="", may_change=True)
    total_steps: int = setting(default=100, at_least=1, may_change=True)
    batch_size: int = setting(default=32, at_least=1)  # tasks per step
    group_size: int = setting(default=8, at_least=1)  # episodes per task (rollout.n)
    seed: int = 0
    save_freq: int = setting(default=10, at_least=1, may_change=True)
    test_freq: int = setting(default=10, at_least=1, may_change=True)
    keep_checkpoints: int = setting(default=2, at_least=1, may_change=True)  # besides the best
    # a damaged newest checkpoint is an error; by default the run continues from an older one
    strict_resume: bool = setting(default=False, may_change=True)
    val_before_train: bool = True
    val_only: bool = False
    val_tasks: int = setting(default=64, at_least=1)  # per environment, always the same
    val_temperature: float = setting(default=0.0, at_least=0)
    baselines: tuple[str, ...] = ()  # "oracle", "random": they play the validation tasks once
    max_bad_updates: int = 3  # in a row without a finite gradient, or steps without an episode
    turns_schedule: tuple[int, ...] = ()  # turn limits in order; empty: rollout.max_turns
    turns_schedule_steps: int = setting(default=100, at_least=1)  # steps per turn limit
    tensorboard: bool = setting(default=False, may_change=True)  # events in run_dir/tensorboard
    wandb_project: str = setting(default="", may_change=True)  # empty: no wandb
    export: bool = setting(default=True, may_change=True)  # to export/<step>/, at the end
    next_command: str = setting(default="", may_change=True)  # printed at the end

    def __post_init__(self) -> None:
        _require(bool(self.run_dir), "train.run_dir is required")


@settings("evaluate")
class EvaluateSettings:
    """A fixed set of tasks, and the policies that play it."""

    policies: tuple[str, ...] = ()
    """"oracle", "random", or a path: a Hugging Face directory, a run, a checkpoint of one."""
    out_dir: str = ""
    tasks_per_env: int = setting(default=50, at_least=1)  # at most; larger sets contain smaller
    split: Literal["train", "test"] = "test"  # of embedded environments; others have no splits
    task_files: tuple[str, ...] = ()  # tasks from files, in their order, instead of the split
    samples: int = setting(default=1, at_least=1)  # episodes per task: the k of avg@k and pass@k
    seed: int = 0

    def __post_init__(self) -> None:
        kinds = "'oracle', 'random', or the path of a model"
        _require(bool(self.policies), f"evaluate.policies is required: a list of {kinds}")
        twice = next((p for p in self.policies if self.policies.count(p) > 1), None)
        _require(twice is None, f"evaluate.policies names {twice!r} twice")
        _require(bool(self.out_dir), "evaluate.out_dir is required")

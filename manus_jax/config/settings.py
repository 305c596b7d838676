"""Every setting, by the gin name that binds it.

Each class is one group of bindings: `OptimizerSettings.lr` is bound by `optimizer.lr = 1e-5`.
`setting(...)` gives the limits of a value and says whether it may change when a run is resumed.
Upper limits are far above useful values; they catch slips such as a zero too many.
`config.commands` says which command reads which groups.
"""

from typing import Any, Literal
from urllib.parse import urlsplit

from manus_jax.config.binding import require, setting, settings
from manus_jax.config.server_settings import EnvPoolSettings as EnvPoolSettings
from manus_jax.config.server_settings import VllmSettings as VllmSettings

Overlong = Literal["error", "drop", "cut"]
PromptSource = Literal["environment", "dataset", "observation"]
PromptLayout = Literal["user", "system", "acknowledged"]
MAX_SEED = 2**32 - 1
_MAX_TOKENS = 2**22
_MAX_STEPS = 10**8
_MAX_SECONDS = 10**6


@settings("model")
class ModelSettings:
    """Where the policy comes from."""

    # A Hugging Face directory or a run directory; None: see `scratch`.
    path: str | None = setting(default=None, text="path")


@settings("scratch")
class ScratchSettings:
    """A small, randomly initialised model with a tokenizer trained on the data."""

    family: Literal["qwen2", "qwen3", "llama"] = "qwen3"
    vocab_size: int = setting(default=2048, at_least=259, at_most=2**20)  # 256 bytes, 3 special
    hidden_size: int = setting(default=128, at_least=1, at_most=2**16)
    intermediate_size: int = setting(default=384, at_least=1, at_most=2**18)
    num_layers: int = setting(default=4, at_least=1, at_most=1000)
    num_heads: int = setting(default=4, at_least=1, at_most=1024)
    num_kv_heads: int = setting(default=2, at_least=1, at_most=1024)
    head_dim: int = setting(default=32, at_least=2, at_most=1024)
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"scratch.num_heads = {self.num_heads} is not divisible by scratch.num_kv_heads = "
            f"{self.num_kv_heads}",
        )
        require(
            self.head_dim % 2 == 0,
            f"scratch.head_dim = {self.head_dim} is odd; rotary embeddings need it even",
        )


@settings("compute")
class ComputeSettings:
    """How the forward pass is computed; this does not change its result."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["full", "offload", "attention", "minimal", "none"] = "full"
    attention: Literal["auto", "plain", "splash", "triton"] = "auto"  # auto: by platform


@settings("mesh", may_change=True)
class MeshSettings:
    """Sizes of the device mesh; -1 takes the remaining devices (docs/meshes.md)."""

    # Copies of the model; devices that share one copy; devices that split heads, MLP columns and
    # the vocabulary; devices that split the tokens of a row.
    data: int = setting(default=1, at_least=-1, at_most=2**20)
    fsdp: int = setting(default=-1, at_least=-1, at_most=2**20)
    tensor: int = setting(default=1, at_least=-1, at_most=2**20)
    sequence: int = setting(default=1, at_least=-1, at_most=2**20)
    # Parts of "data" joined by DCN; None: from the TPU devices, else 1.
    slices: int | None = setting(default=None, at_least=1, at_most=2**16)

    def __post_init__(self) -> None:
        sizes = {axis: getattr(self, axis) for axis in ("data", "fsdp", "tensor", "sequence")}
        zero = next((axis for axis, size in sizes.items() if size == 0), None)
        require(zero is None, f"mesh.{zero} = 0 must be at least 1, or -1 for the rest")
        free = [f"mesh.{axis}" for axis, size in sizes.items() if size == -1]
        require(len(free) < 2, f"only one mesh size may be -1, and {' and '.join(free)} are")


@settings("distributed", may_change=True)
class DistributedSettings:
    """Training with several processes, each with its own devices (docs/multi_host.md)."""

    mode: Literal["auto", "on", "off"] = "auto"  # auto: on if JAX detects a cluster
    # host:port of process 0, the number of processes, and that of this one; None: JAX detects it.
    coordinator: str | None = setting(default=None, text="url")
    processes: int | None = setting(default=None, at_least=1, at_most=2**20)
    process_id: int | None = setting(default=None, at_least=0, at_most=2**20)
    # Seconds until all processes are connected; until a silent process counts as dead; the longest
    # wait for the others.
    connect_s: float = setting(default=300.0, at_least=1, at_most=_MAX_SECONDS)
    heartbeat_s: float = setting(default=30.0, at_least=1, at_most=_MAX_SECONDS)
    timeout_s: float = setting(default=7200.0, at_least=1, at_most=_MAX_SECONDS)

    def __post_init__(self) -> None:
        number, count = self.process_id, self.processes
        require(
            number is None or count is None or number < count,
            f"distributed.process_id = {number} of distributed.processes = {count}: from 0 to "
            f"{(count or 1) - 1}",
        )
        where = self.coordinator
        require(
            where is None or urlsplit(f"//{where}").port is not None,
            f"distributed.coordinator = {where!r} has no port; write HOST:PORT",
        )


@settings("status", may_change=True)
class StatusSettings:
    """`status.json` and the watchdog (docs/operations.md)."""

    every_s: float = setting(default=5.0, at_least=0.1, at_most=3600)  # between writes
    watchdog_minutes: float = setting(default=10.0, at_least=0, at_most=10_000)  # 0: off


@settings("compilation", may_change=True)
class CompilationSettings:
    """Compiled programs are kept on disk for the next start (docs/operations.md)."""

    # None: not kept. The variable JAX_COMPILATION_CACHE_DIR takes precedence.
    cache_dir: str | None = setting(default="~/.cache/manus_jax/compiled", text="path")


@settings("optimizer")
class OptimizerSettings:
    """The optimizer and its memory (docs/memory.md)."""

    name: Literal["adamw", "adafactor"] = "adamw"
    moment_dtype: Literal["float32", "bfloat16"] = "float32"  # of AdamW's first moment
    # Where its state is kept between updates.
    state: Literal["device", "host"] = setting(default="device", may_change=True)
    lr: float = setting(default=1e-6, above=0, at_most=10)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = setting(default=0, at_least=0, at_most=_MAX_STEPS)
    # Of lr, at the end of cosine and linear.
    min_lr_ratio: float = setting(default=0.0, at_least=0, at_most=1)
    weight_decay: float = setting(default=0.01, at_least=0, at_most=10)
    b1: float = setting(default=0.9, at_least=0, below=1)
    b2: float = setting(default=0.999, at_least=0, below=1)
    eps: float = setting(default=1e-8, above=0, at_most=1)
    grad_clip: float = setting(default=1.0, above=0, at_most=1e9)  # of the global norm

    def __post_init__(self) -> None:
        default = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "moment_dtype": "float32"}
        changed = [name for name, value in default.items() if getattr(self, name) != value]
        require(
            self.name == "adamw" or not changed,
            f"optimizer.name = {self.name!r} does not read optimizer.{''.join(changed[:1])}",
        )


@settings("data")
class DataSettings:
    """The tasks or conversations, and the rows that their tokens are packed into."""

    # Empty: the environments' own training tasks, and their own test tasks.
    train_files: tuple[str, ...] = setting(default=(), text="path")
    val_files: tuple[str, ...] = setting(default=(), text="path")
    # Of the train files in the mixture; empty: by size.
    train_weights: tuple[float, ...] = setting(default=(), above=0, at_most=1e9)
    max_length: int = setting(default=2048, at_least=2, at_most=_MAX_TOKENS)  # tokens in a row
    # Rows in a micro-batch, over all devices.
    rows: int = setting(default=1, at_least=1, at_most=2**17)
    overlong: Overlong = "cut"  # sequences longer than a row: error, drop, or cut after a turn

    def __post_init__(self) -> None:
        require(
            not self.train_weights or len(self.train_weights) == len(self.train_files),
            f"data.train_weights has {len(self.train_weights)} numbers for "
            f"{len(self.train_files)} train files",
        )
        tokens = self.rows * self.max_length
        require(
            tokens < 2**31,
            f"data.rows = {self.rows} x data.max_length = {self.max_length} are {tokens} tokens, "
            "more than a micro-batch can have",
        )


@settings("sft")
class SftSettings:
    """Supervised fine-tuning."""

    run_dir: str = setting(default="", text="path", may_change=True)
    total_steps: int = setting(default=100, at_least=1, at_most=_MAX_STEPS, may_change=True)
    batch_size: int = setting(default=16, at_least=1, at_most=10**5)  # conversations per update
    seed: int = setting(default=0, at_least=0, at_most=MAX_SEED)
    # Updates between checkpoints, and between validations.
    save_freq: int = setting(default=50, at_least=1, at_most=_MAX_STEPS, may_change=True)
    test_freq: int = setting(default=25, at_least=1, at_most=_MAX_STEPS, may_change=True)
    keep_checkpoints: int = setting(default=2, at_least=1, at_most=10**6, may_change=True)
    # Updates in a row that are not finite.
    max_bad_updates: int = setting(default=3, at_least=1, at_most=10**6, may_change=True)
    strict_resume: bool = setting(default=False, may_change=True)  # see train.strict_resume
    export: bool = setting(default=True, may_change=True)  # to export/<step>/, at the end

    def __post_init__(self) -> None:
        require(bool(self.run_dir), "sft.run_dir is required")


@settings("env")
class EnvSettings:
    """The environments to play, and the addresses of their servers."""

    names: tuple[str, ...] = setting(default=(), distinct=True)
    urls: dict[str, str | tuple[str, ...]] = setting(factory=dict, text="url", may_change=True)
    """AgentGym servers by environment: {"sciworld": ["http://…:36001"]}. The servers of an
    environment without addresses are started by the program."""
    servers_per_env: int = setting(default=1, at_least=1, at_most=1000, may_change=True)

    def __post_init__(self) -> None:
        require(bool(self.names), "env.names is required, e.g. env.names = ['textcraft']")
        unused = [name for name in self.urls if name not in self.names]
        require(not unused, f"env.urls has {unused}, which env.names does not")
        empty = [name for name, urls in self.urls.items() if not urls]
        require(not empty, f"env.urls has no address for {empty}; list some or leave it out")


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

    max_turns: int = setting(default=30, at_least=1, at_most=10**5)
    max_tokens_per_turn: int = setting(default=256, at_least=1, at_most=_MAX_TOKENS)
    max_total_tokens: int = setting(default=4096, at_least=2, at_most=_MAX_TOKENS)
    min_turn_tokens: int = setting(default=16, at_least=1, at_most=_MAX_TOKENS)
    max_observation_tokens: int = setting(default=1024, at_least=1, at_most=_MAX_TOKENS)
    max_observation_chars: int = setting(default=20_000, at_least=1, at_most=10**9)
    temperature: float = setting(default=1.0, at_least=0, at_most=100)  # 0: greedy
    top_p: float = setting(default=1.0, above=0, at_most=1)
    top_k: int = setting(default=0, at_least=0, at_most=10**7)  # 0: off
    # Turns that are kept; None: all.
    memory_turns: int | None = setting(default=None, at_least=0, at_most=10**5)
    action_format: str = "auto"  # the environment's own, or a name in action_formats.FORMATS
    prompt_source: PromptSource = "environment"
    prompt_layout: PromptLayout = "user"
    # Of the environment's examples, at most.
    prompt_examples: int = setting(default=1, at_least=0, at_most=1000)
    # Per turn without valid action.
    invalid_action_penalty: float = setting(default=0.0, at_least=0, at_most=10**6)
    # Seconds per turn.
    generation_timeout: float = setting(default=600.0, above=0, at_most=_MAX_SECONDS)
    # Seconds per episode, all attempts together; longer ones are dropped. None: no limit.
    episode_timeout: float | None = setting(default=None, above=0, at_most=_MAX_SECONDS)
    # Episodes played at the same time.
    max_in_flight: int = setting(default=1024, at_least=1, at_most=10**5)

    def __post_init__(self) -> None:
        least = min(self.min_turn_tokens, self.max_tokens_per_turn)
        require(
            least < self.max_total_tokens,
            f"rollout.max_total_tokens = {self.max_total_tokens} leaves no room for a turn of "
            f"{least} tokens (rollout.min_turn_tokens, rollout.max_tokens_per_turn)",
        )


@settings("engine")
class EngineSettings:
    """The engine that generates: "jax" (embedded), "vllm" (servers), or another registered one."""

    name: str = "jax"
    # Episodes whose KV cache is kept.
    slots: int = setting(default=32, at_least=1, at_most=2**16, may_change=True)
    # Tokens in the KV cache, over all devices; None: slots x rollout.max_total_tokens.
    cache_tokens: int | None = setting(default=None, at_least=1, at_most=2**40, may_change=True)
    # Devices that share one copy of the weights; None: mesh.tensor.
    tensor: int | None = setting(default=None, at_least=1, at_most=2**20, may_change=True)
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Tokens between two looks at the queue.
    max_steps: int = setting(default=8, at_least=1, at_most=2**16, may_change=True)


@settings("algorithm")
class AlgorithmSettings:
    """The algorithm. None takes the recipe's value (algorithms/recipes.py)."""

    recipe: str = "grpo"
    gamma: float | None = setting(default=None, at_least=0, at_most=1)
    lam: float | None = setting(default=None, at_least=0, at_most=1)
    normalize_by_std: bool | None = None  # norm_adv_by_std_in_grpo
    step_weight: float | None = setting(default=None, at_least=0, at_most=1000)  # step_advantage_w
    clip_low: float | None = setting(default=None, at_least=0, at_most=1)
    clip_high: float | None = setting(default=None, at_least=0, at_most=1000)
    dual_clip: float | None = setting(default=None, at_least=0, at_most=1000)  # 0: off
    entropy_coef: float | None = setting(default=None, at_least=0, at_most=1000)
    aggregation: str | None = None  # loss_agg_mode
    # The divisor of seq-mean-token-sum-norm.
    norm_constant: float | None = setting(default=None, above=0, at_most=1e9)
    corrections: tuple[str, ...] | None = setting(default=None, distinct=True)  # CORRECTIONS
    kl_placement: Literal["none", "reward", "loss"] | None = None
    kl_coef: float | None = setting(default=None, at_least=0, at_most=1000)
    kl_estimator: str | None = None
    kl_controller: Literal["fixed", "adaptive"] = "fixed"  # of the KL in the reward
    target_kl: float = setting(default=0.1, above=0, at_most=1000)
    kl_horizon: int = setting(default=10_000, at_least=1, at_most=10**9)
    # Where the reference policy is kept, and in which type.
    reference: Literal["device", "host"] = setting(default="device", may_change=True)
    reference_dtype: Literal["float32", "bfloat16"] = "float32"
    dynamic_sampling: bool | None = None  # replace groups whose outcomes are all equal
    # Batches of dynamic sampling, per step.
    max_gen_batches: int = setting(default=10, at_least=1, at_most=10**5)
    # gigpo: anchors at least this similar are one; None: if equal.
    similarity: float | None = setting(default=None, above=0, at_most=1)
    old_log_probs: Literal["recompute", "bypass"] = "recompute"  # bypass: the sampler's own
    ppo_epochs: int = setting(default=1, at_least=1, at_most=1000)
    # Tasks per update; None: all.
    mini_batch_size: int | None = setting(default=None, at_least=1, at_most=10**5)
    # Steps in which only the critic is updated.
    critic_warmup: int = setting(default=0, at_least=0, at_most=_MAX_STEPS)
    cliprange_value: float = setting(default=0.5, above=0, at_most=10**6)
    critic_lr: float = setting(default=1e-5, above=0, at_most=10)
    reward: str = "env"  # a name in rewards.REWARDS
    reward_parameters: dict[str, Any] = setting(factory=dict)
    reward_allocation: str = "last_token"  # a name in reward_allocation.ALLOCATIONS
    allocation_gamma: float = setting(default=1.0, at_least=0, at_most=1)
    on_reward_error: Literal["raise", "drop"] = "raise"

    def __post_init__(self) -> None:
        require(
            not self.dual_clip or self.dual_clip > 1,
            f"algorithm.dual_clip = {self.dual_clip} must be above 1, or 0 for none",
        )


@settings("warm_start")
class WarmStartSettings:
    """Supervised fine-tuning before the first step, on episodes of the oracle; 0 steps: none."""

    steps: int = setting(default=0, at_least=0, at_most=_MAX_STEPS)
    traces: int = setting(default=200, at_least=1, at_most=10**6)  # episodes of training tasks
    random_share: float = setting(default=0.0, at_least=0, below=1)  # by a random policy
    batch_size: int = setting(default=16, at_least=1, at_most=10**5)
    lr: float = setting(default=1e-3, above=0, at_most=10)


@settings("train")
class TrainSettings:
    """The run."""

    # "{recipe}" and "{env}" are replaced by their names
    run_dir: str = setting(default="", text="path", may_change=True)
    total_steps: int = setting(default=100, at_least=1, at_most=_MAX_STEPS, may_change=True)
    batch_size: int = setting(default=32, at_least=1, at_most=10**5)  # tasks per step
    group_size: int = setting(default=8, at_least=1, at_most=10**4)  # episodes per task (rollout.n)
    # Updates by which episodes may precede the weights they train; 0: synchronous (docs/async.md).
    max_staleness: int = setting(default=0, at_least=0, at_most=1000)
    seed: int = setting(default=0, at_least=0, at_most=MAX_SEED)
    save_freq: int = setting(default=10, at_least=1, at_most=_MAX_STEPS, may_change=True)
    test_freq: int = setting(default=10, at_least=1, at_most=_MAX_STEPS, may_change=True)
    # Besides the best.
    keep_checkpoints: int = setting(default=2, at_least=1, at_most=10**6, may_change=True)
    # A damaged newest checkpoint is an error; by default the run continues from an older one.
    strict_resume: bool = setting(default=False, may_change=True)
    val_before_train: bool = True
    val_only: bool = False
    # Per environment, always the same.
    val_tasks: int = setting(default=64, at_least=1, at_most=10**6)
    val_temperature: float = setting(default=0.0, at_least=0, at_most=100)
    # They play the validation tasks once.
    baselines: tuple[Literal["oracle", "random"], ...] = setting(default=(), distinct=True)
    # In a row: updates that are not finite, or steps without an episode to train on.
    max_bad_updates: int = setting(default=3, at_least=1, at_most=10**6, may_change=True)
    # Turn limits in order; empty: rollout.max_turns.
    turns_schedule: tuple[int, ...] = setting(default=(), at_least=1, at_most=10**5)
    # Steps per turn limit.
    turns_schedule_steps: int = setting(default=100, at_least=1, at_most=_MAX_STEPS)
    tensorboard: bool = setting(default=False, may_change=True)  # events in run_dir/tensorboard
    wandb_project: str = setting(default="", may_change=True)  # empty: no wandb
    # Traces for TensorBoard and Perfetto in run_dir/profile/<step>.
    profile_steps: tuple[int, ...] = setting(
        default=(), at_least=1, at_most=_MAX_STEPS, distinct=True, may_change=True
    )
    export: bool = setting(default=True, may_change=True)  # to export/<step>/, at the end
    next_command: str = setting(default="", may_change=True)  # printed at the end

    def __post_init__(self) -> None:
        require(bool(self.run_dir), "train.run_dir is required")
        episodes = self.batch_size * self.group_size
        require(
            episodes <= 10**6,
            f"train.batch_size = {self.batch_size} x train.group_size = {self.group_size} are "
            f"{episodes} episodes per step, more than a million",
        )


@settings("evaluate")
class EvaluateSettings:
    """A fixed set of tasks, and the policies that play it."""

    policies: tuple[str, ...] = setting(default=(), text="path", distinct=True)
    """"oracle", "random", or a path: a Hugging Face directory, a run, a checkpoint of one."""
    out_dir: str = setting(default="", text="path")
    # At most; larger sets contain smaller ones.
    tasks_per_env: int = setting(default=50, at_least=1, at_most=10**6)
    split: Literal["train", "test"] = "test"  # of embedded environments; others have no splits
    # Tasks from files, in their order, instead of the split.
    task_files: tuple[str, ...] = setting(default=(), text="path")
    # Episodes per task: the k of avg@k and pass@k.
    samples: int = setting(default=1, at_least=1, at_most=10**4)
    seed: int = setting(default=0, at_least=0, at_most=MAX_SEED)

    def __post_init__(self) -> None:
        kinds = "'oracle', 'random', or the path of a model"
        require(bool(self.policies), f"evaluate.policies is required: a list of {kinds}")
        require(bool(self.out_dir), "evaluate.out_dir is required")

"""Every setting, by the gin name that binds it.

Each class is one group of bindings: `OptimizerSettings.lr` is bound by `optimizer.lr = 1e-5`.
`setting(...)` gives the limits of a value and says whether it may change when a run is resumed.
Limits are far from useful values; they catch slips such as a zero too many, and numbers that
are 0 or 1 in float32 although they are not meant to be.
`config.commands` says which command reads which groups. The groups of the model and its devices are
defined in `model_settings`, those of servers in `server_settings`.
"""

from typing import Any, Literal

from manus_jax.config.binding import changed, require, setting, settings
from manus_jax.config.model_settings import CompilationSettings as CompilationSettings
from manus_jax.config.model_settings import ComputeSettings as ComputeSettings
from manus_jax.config.model_settings import DistributedSettings as DistributedSettings
from manus_jax.config.model_settings import LoraSettings as LoraSettings
from manus_jax.config.model_settings import MeshSettings as MeshSettings
from manus_jax.config.model_settings import ModelSettings as ModelSettings
from manus_jax.config.model_settings import ScratchSettings as ScratchSettings
from manus_jax.config.model_settings import StatusSettings as StatusSettings
from manus_jax.config.server_settings import EnvPoolSettings as EnvPoolSettings
from manus_jax.config.server_settings import VllmSettings as VllmSettings

Overlong = Literal["error", "drop", "cut"]
PromptSource = Literal["environment", "dataset", "observation", "per_turn"]
PromptLayout = Literal["user", "system", "acknowledged"]
ExampleLayout = Literal["turns", "inline"]
Thinking = Literal["keep", "strip", "off"]
LossOn = Literal["turns", "all"]
MAX_SEED = 2**32 - 1
_MAX_TOKENS = 2**22
_MAX_STEPS = 10**8
_MAX_SECONDS = 10**6
_LEAST_LR = 1e-12  # smaller updates do not change a weight
_LEAST_TEMPERATURE = 0.01  # quotients of logits and less overflow


def _check_temperature(name: str, value: float) -> None:
    require(
        value == 0 or value >= _LEAST_TEMPERATURE,
        f"{name} = {value:g} must be at least {_LEAST_TEMPERATURE}, or 0 for the most likely token",
    )


@settings("optimizer")
class OptimizerSettings:
    """The optimizer and its memory (docs/memory.md)."""

    name: Literal["adamw", "adafactor"] = "adamw"
    moment_dtype: Literal["float32", "bfloat16"] = "float32"  # of AdamW's first moment
    # Where the optimizer's state is kept between updates.
    state: Literal["device", "host"] = setting(default="device", may_change=True)
    lr: float = setting(default=1e-6, at_least=_LEAST_LR, at_most=10)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = setting(default=0, at_least=0, at_most=_MAX_STEPS)
    # What is left of lr at the end of the cosine or linear schedule.
    min_lr_ratio: float = setting(default=0.0, at_least=0, at_most=1)
    weight_decay: float = setting(default=0.01, at_least=0, at_most=10)
    b1: float = setting(default=0.9, at_least=0, at_most=0.9999)
    b2: float = setting(default=0.999, at_least=0, at_most=0.999999)
    eps: float = setting(default=1e-8, at_least=1e-30, at_most=1)
    grad_clip: float = setting(default=1.0, at_least=1e-9, at_most=1e9)  # limits the global norm

    def __post_init__(self) -> None:
        of_adamw = changed(self, "b1", "b2", "eps", "moment_dtype")
        require(
            self.name == "adamw" or not of_adamw,
            f"optimizer.name = {self.name!r} does not read optimizer.{''.join(of_adamw[:1])}",
        )
        require(
            self.schedule != "constant" or not self.min_lr_ratio,
            f"optimizer.min_lr_ratio = {self.min_lr_ratio} is the end of a schedule, and "
            "optimizer.schedule is 'constant'",
        )


@settings("data")
class DataSettings:
    """The tasks or conversations, and the rows that their tokens are packed into."""

    # Empty: the environments' own training tasks, and their own test tasks.
    train_files: tuple[str, ...] = setting(default=(), text="path", distinct=True)
    val_files: tuple[str, ...] = setting(default=(), text="path", distinct=True)
    # Weights of the train files in the mixture; empty: their sizes.
    train_weights: tuple[float, ...] = setting(default=(), at_least=1e-9, at_most=1e9)
    # A curriculum: so many tasks are first played from each train file alone, in order; 0: none.
    stage_tasks: int = setting(default=0, at_least=0, at_most=10**9)
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
        require(
            not self.stage_tasks or len(self.train_files) > 1,
            f"data.stage_tasks = {self.stage_tasks} needs several data.train_files, one per stage",
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
    # The assistant's turns, or every token of a conversation; held-out losses are of turns.
    loss_on: LossOn = "turns"
    # The run ends after so many updates in a row that are not finite.
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
    python: dict[str, str] = setting(factory=dict, text="path", may_change=True)
    """Interpreters that run the servers of an environment, or of all of an adapter, if not this
    program's: {"sciworld": "venvs/sciworld/bin/python"}. scripts/setup_env.sh creates them."""

    def __post_init__(self) -> None:
        require(bool(self.names), "env.names is required, e.g. env.names = ['textcraft']")
        started = [name for name in self.names if name not in self.urls]
        served = {*started, *(name.partition(":")[0] for name in started)}
        idle = [name for name in self.python if name not in served]
        require(not idle, f"env.python has {idle}, but this run starts servers of {started} only")
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
    ("observation"), for a model fine-tuned on the environment. With "per_turn" every turn has a
    prompt of its own instead of a conversation: the task, the last `memory_turns` turns and the
    actions that are possible, as in GiGPO (docs/chat.md). `prompt_layout` puts the instruction
    and the first observation into one user turn ("user"), the instruction into the system turn
    ("system"), or into a user turn that the assistant acknowledges before the observation
    ("acknowledged"), as in AgentGym's conversations. `example_layout` makes the examples turns of
    the conversation ("turns"), or part of the instruction ("inline").
    """

    strategy: str = "episode"  # a name in rollout.strategies.STRATEGIES
    strategy_parameters: dict[str, Any] = setting(factory=dict)
    max_turns: int = setting(default=30, at_least=1, at_most=10**5)
    max_tokens_per_turn: int = setting(default=256, at_least=1, at_most=_MAX_TOKENS)
    max_total_tokens: int = setting(default=4096, at_least=2, at_most=_MAX_TOKENS)
    min_turn_tokens: int = setting(default=16, at_least=1, at_most=_MAX_TOKENS)
    # Tokens per turn after which an unfinished thought is ended; None: no limit.
    thinking_tokens: int | None = setting(default=None, at_least=1, at_most=_MAX_TOKENS - 1)
    max_observation_tokens: int = setting(default=1024, at_least=1, at_most=_MAX_TOKENS)
    max_observation_chars: int = setting(default=20_000, at_least=1, at_most=10**9)
    temperature: float = setting(default=1.0, at_least=0, at_most=100)  # 0: greedy
    top_p: float = setting(default=1.0, at_least=1e-6, at_most=1)
    top_k: int = setting(default=0, at_least=0, at_most=10**7)  # 0: off
    # Turns that stay in the prompt; None: all.
    memory_turns: int | None = setting(default=None, at_least=0, at_most=10**5)
    action_format: str = "auto"  # the environment's own, or a name in action_formats.FORMATS
    prompt_source: PromptSource = "environment"
    prompt_layout: PromptLayout = "user"
    # The number of the environment's examples in the prompt, at most.
    prompt_examples: int = setting(default=1, at_least=0, at_most=1000)
    example_layout: ExampleLayout = "turns"
    # Subtracted from the reward of every turn without a valid action.
    invalid_action_penalty: float = setting(default=0.0, at_least=0, at_most=10**6)
    # Seconds that the engine may take for a turn.
    generation_timeout: float = setting(default=600.0, at_least=0.001, at_most=_MAX_SECONDS)
    # Seconds per episode from its first session on, including repeated attempts. Longer episodes
    # are dropped, and replaced in asynchronous runs. None: no limit.
    episode_timeout: float | None = setting(default=None, above=0, at_most=_MAX_SECONDS)
    # Episodes played at the same time. With a minimum, the number follows the load of the engine
    # and the environments; None: always max_in_flight.
    max_in_flight: int = setting(default=1024, at_least=1, at_most=10**5)
    min_in_flight: int | None = setting(default=None, at_least=1, at_most=10**5)

    def __post_init__(self) -> None:
        _check_temperature("rollout.temperature", self.temperature)
        require(
            self.min_in_flight is None or self.min_in_flight <= self.max_in_flight,
            f"rollout.min_in_flight = {self.min_in_flight} is more than rollout.max_in_flight = "
            f"{self.max_in_flight}",
        )
        least = min(self.min_turn_tokens, self.max_tokens_per_turn)
        require(
            least < self.max_total_tokens,
            f"rollout.max_total_tokens = {self.max_total_tokens} leaves no room for a turn of "
            f"{least} tokens (rollout.min_turn_tokens, rollout.max_tokens_per_turn)",
        )
        budget = self.thinking_tokens
        require(
            budget is None or budget < self.max_tokens_per_turn,
            f"rollout.thinking_tokens = {budget} leaves no room for an answer within "
            f"rollout.max_tokens_per_turn = {self.max_tokens_per_turn}",
        )


@settings("chat")
class ChatSettings:
    """The model's chat template (docs/chat.md); the same for rollouts, evaluation and fine-tuning.

    `thinking` says what happens to the thoughts of earlier turns: they stay, so that every prompt
    extends the last one ("keep"), or the template removes them, and the sample forks ("strip").
    "off" makes the template turn thinking off.
    """

    # Arguments of the template, such as {"enable_thinking": False}.
    template_kwargs: dict[str, Any] = setting(factory=dict)
    thinking: Thinking = "keep"


@settings("engine")
class EngineSettings:
    """The engine that generates: "jax" (embedded), "vllm" (servers), or another registered one."""

    name: str = "jax"
    # Episodes that have a place in the KV cache.
    slots: int = setting(default=32, at_least=1, at_most=2**16, may_change=True)
    # Tokens in the KV cache, over all devices; None: slots x rollout.max_total_tokens.
    cache_tokens: int | None = setting(default=None, at_least=1, at_most=2**40, may_change=True)
    # Devices of process 0 that only the engine uses; 0: it shares the learner's (docs/async.md).
    devices: int = setting(default=0, at_least=0, at_most=2**16, may_change=True)
    # Devices that share one copy of the weights; None: mesh.tensor.
    tensor: int | None = setting(default=None, at_least=1, at_most=2**20, may_change=True)
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Tokens that are generated between two checks of the queue.
    max_steps: int = setting(default=8, at_least=1, at_most=2**16, may_change=True)


@settings("algorithm")
class AlgorithmSettings:
    """The algorithm. None takes the recipe's value (algorithms/recipes.py)."""

    recipe: str = "grpo"
    gamma: float | None = setting(default=None, at_least=0, at_most=1)
    lam: float | None = setting(default=None, at_least=0, at_most=1)
    normalize_by_std: bool | None = None  # norm_adv_by_std_in_grpo
    step_weight: float | None = setting(default=None, at_least=0, at_most=1000)  # step_advantage_w
    beta: float | None = setting(default=None, at_least=1e-6, at_most=1000)  # dpo
    clip_low: float | None = setting(default=None, at_least=0, at_most=1)
    clip_high: float | None = setting(default=None, at_least=0, at_most=1000)
    dual_clip: float | None = setting(default=None, at_least=0, at_most=1000)  # 0: off
    entropy_coef: float | None = setting(default=None, at_least=0, at_most=1000)
    aggregation: str | None = None  # loss_agg_mode
    # The divisor of seq-mean-token-sum-norm.
    norm_constant: float | None = setting(default=None, at_least=1e-3, at_most=1e9)
    corrections: tuple[str, ...] | None = setting(default=None, distinct=True)  # CORRECTIONS
    kl_placement: Literal["none", "reward", "loss"] | None = None
    kl_coef: float | None = setting(default=None, at_least=0, at_most=1000)
    kl_estimator: str | None = None
    kl_controller: Literal["fixed", "adaptive"] = "fixed"  # of the KL in the reward
    target_kl: float = setting(default=0.1, at_least=1e-6, at_most=1000)
    kl_horizon: int = setting(default=10_000, at_least=1, at_most=10**9)
    # Where the reference policy is kept, and in which type.
    reference: Literal["device", "host"] = setting(default="device", may_change=True)
    reference_dtype: Literal["float32", "bfloat16"] = "float32"
    dynamic_sampling: bool | None = None  # replace groups whose outcomes are all equal
    # Dynamic sampling plays at most so many batches per step.
    max_gen_batches: int = setting(default=10, at_least=1, at_most=10**5)
    # gigpo: observations at least this similar count as equal; None: only equal ones do.
    similarity: float | None = setting(default=None, above=0, at_most=1)
    old_log_probs: Literal["recompute", "bypass"] = "recompute"  # bypass: the sampler's own
    ppo_epochs: int = setting(default=1, at_least=1, at_most=1000)
    # Tasks per update; None: all of a step.
    mini_batch_size: int | None = setting(default=None, at_least=1, at_most=10**5)
    # Steps in which only the critic is updated.
    critic_warmup: int = setting(default=0, at_least=0, at_most=_MAX_STEPS)
    cliprange_value: float = setting(default=0.5, at_least=1e-6, at_most=10**6)
    critic_lr: float = setting(default=1e-5, at_least=_LEAST_LR, at_most=10)
    reward: str = "env"  # a name in rewards.REWARDS
    reward_parameters: dict[str, Any] = setting(factory=dict)
    reward_allocation: str = "last_token"  # a name in reward_allocation.ALLOCATIONS
    allocation_gamma: float = setting(default=1.0, at_least=0, at_most=1)
    on_reward_error: Literal["raise", "drop"] = "raise"
    # Permutes rewards between the episodes of a step: a control, from which nothing can be learned.
    shuffle_rewards: bool = False

    def __post_init__(self) -> None:
        require(
            not self.dual_clip or self.dual_clip > 1,
            f"algorithm.dual_clip = {self.dual_clip} must be above 1, or 0 for none",
        )
        require(
            self.kl_controller == "adaptive" or not changed(self, "target_kl", "kl_horizon"),
            "algorithm.target_kl and algorithm.kl_horizon are only read with "
            "algorithm.kl_controller = 'adaptive'",
        )


@settings("warm_start")
class WarmStartSettings:
    """Supervised fine-tuning before the first step, on episodes of the oracle; 0 steps: none.

    An environment without an oracle needs a `random_share` of 1. A small model from scratch learns
    sooner to copy from its context with `loss_on` "all", because observations repeat themselves.
    """

    steps: int = setting(default=0, at_least=0, at_most=_MAX_STEPS)
    traces: int = setting(default=200, at_least=1, at_most=10**6)  # episodes of training tasks
    random_share: float = setting(default=0.0, at_least=0, at_most=1)  # by a random policy
    batch_size: int = setting(default=16, at_least=1, at_most=10**5)
    loss_on: LossOn = "turns"  # see sft.loss_on
    lr: float = setting(default=1e-3, at_least=_LEAST_LR, at_most=10)


@settings("train")
class TrainSettings:
    """The run."""

    # "{recipe}" and "{env}" stand for the names of the recipe and of the environments.
    run_dir: str = setting(default="", text="path", may_change=True)
    total_steps: int = setting(default=100, at_least=1, at_most=_MAX_STEPS, may_change=True)
    batch_size: int = setting(default=32, at_least=1, at_most=10**5)  # tasks per step
    group_size: int = setting(default=8, at_least=1, at_most=10**4)  # episodes per task (rollout.n)
    # Runs or trajectory files whose episodes are trained on; empty: episodes are played.
    trajectories: tuple[str, ...] = setting(default=(), text="path", distinct=True)
    # Updates by which episodes may precede the weights they train; 0: synchronous (docs/async.md).
    max_staleness: int = setting(default=0, at_least=0, at_most=1000)
    seed: int = setting(default=0, at_least=0, at_most=MAX_SEED)
    save_freq: int = setting(default=10, at_least=1, at_most=_MAX_STEPS, may_change=True)
    test_freq: int = setting(default=10, at_least=1, at_most=_MAX_STEPS, may_change=True)
    # The newest checkpoints that are kept, in addition to the best one.
    keep_checkpoints: int = setting(default=2, at_least=1, at_most=10**6, may_change=True)
    # A damaged newest checkpoint is an error; by default the run continues from an older one.
    strict_resume: bool = setting(default=False, may_change=True)
    val_before_train: bool = True
    val_only: bool = False
    # Validation tasks per environment; they are always the same.
    val_tasks: int = setting(default=64, at_least=1, at_most=10**6)
    val_temperature: float = setting(default=0.0, at_least=0, at_most=100)
    # Policies that play the validation tasks once, before the first step.
    baselines: tuple[Literal["oracle", "random"], ...] = setting(default=(), distinct=True)
    # The run ends after so many updates in a row that are not finite, or so many steps without an
    # episode to train on.
    max_bad_updates: int = setting(default=3, at_least=1, at_most=10**6, may_change=True)
    # Turn limits that follow each other during the run; empty: rollout.max_turns.
    turns_schedule: tuple[int, ...] = setting(default=(), at_least=1, at_most=10**5)
    # Steps with each of these turn limits.
    turns_schedule_steps: int = setting(default=100, at_least=1, at_most=_MAX_STEPS)
    tensorboard: bool = setting(default=False, may_change=True)  # writes to run_dir/tensorboard
    wandb_project: str = setting(default="", may_change=True)  # empty: no wandb
    # Steps whose profiles are written to run_dir/profile/<step>, for TensorBoard and Perfetto.
    profile_steps: tuple[int, ...] = setting(
        default=(), at_least=1, at_most=_MAX_STEPS, distinct=True, may_change=True
    )
    export: bool = setting(default=True, may_change=True)  # to export/<step>/, at the end
    next_command: str = setting(default="", may_change=True)  # printed at the end

    def __post_init__(self) -> None:
        require(bool(self.run_dir), "train.run_dir is required")
        _check_temperature("train.val_temperature", self.val_temperature)
        episodes = self.batch_size * self.group_size * (1 + self.max_staleness)
        require(
            episodes <= 10**6,
            f"train.batch_size = {self.batch_size} x train.group_size = {self.group_size} x "
            f"(1 + train.max_staleness = {self.max_staleness}) are {episodes} episodes at a time, "
            "more than a million",
        )
        require(
            not (self.trajectories and self.max_staleness),
            f"train.max_staleness = {self.max_staleness} is for episodes that are played ahead, "
            "and those in train.trajectories are recorded",
        )
        require(
            bool(self.turns_schedule) or not changed(self, "turns_schedule_steps"),
            "train.turns_schedule_steps is set, and train.turns_schedule is empty",
        )


@settings("evaluate")
class EvaluateSettings:
    """A fixed set of tasks, and the policies that play it."""

    policies: tuple[str, ...] = setting(default=(), text="path", distinct=True)
    """"oracle", "random", a path (a Hugging Face directory, a run, a checkpoint of one), or
    openai:MODEL@URL for a model behind OpenAI's chat API, with its key in OPENAI_API_KEY."""
    out_dir: str = setting(default="", text="path")
    # Tasks per environment, at most; larger sets contain smaller ones.
    tasks_per_env: int = setting(default=50, at_least=1, at_most=10**6)
    split: Literal["train", "test"] = "test"  # of embedded environments; others have no splits
    # Tasks from files, in their order, instead of the split.
    task_files: tuple[str, ...] = setting(default=(), text="path", distinct=True)
    # Episodes per task: the k of avg@k and pass@k.
    samples: int = setting(default=1, at_least=1, at_most=10**4)
    seed: int = setting(default=0, at_least=0, at_most=MAX_SEED)

    def __post_init__(self) -> None:
        kinds = "'oracle', 'random', or the path of a model"
        require(bool(self.policies), f"evaluate.policies is required: a list of {kinds}")
        require(bool(self.out_dir), "evaluate.out_dir is required")

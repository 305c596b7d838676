"""Settings of the model, the devices it runs on, and the process."""

from typing import Literal
from urllib.parse import urlsplit

from manus_jax.config.binding import changed, require, setting, settings

_MAX_SECONDS = 10**6


@settings("model")
class ModelSettings:
    """Where the policy comes from."""

    # A Hugging Face directory or a run directory; None: see `scratch`.
    path: str | None = setting(default=None, text="path")
    # Weight of the loss that makes the tokens of a batch use all experts of a model equally.
    load_balancing: float = setting(default=0.0, at_least=0, at_most=100)


@settings("scratch")
class ScratchSettings:
    """A small, randomly initialised model with a tokenizer trained on the data."""

    family: Literal["qwen2", "qwen3", "llama"] = "qwen3"
    vocab_size: int = setting(default=2048, at_least=259, at_most=2**20)  # 256 bytes, 3 special
    # "words": a token is at most one word; "phrases": frequent phrases are tokens, which makes the
    # texts of an environment with few sentences several times shorter.
    tokens: Literal["words", "phrases"] = "words"
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


@settings("lora")
class LoraSettings:
    """Low-rank adapters over a frozen model (docs/lora.md); without a rank, all weights train."""

    rank: int | None = setting(default=None, at_least=1, at_most=4096)
    alpha: float = setting(default=16.0, above=0, at_most=10**6)  # changes are times alpha / rank
    # "all-linear", or names of linear layers such as "q_proj".
    target_modules: str | tuple[str, ...] = setting(default="all-linear", distinct=True)
    # Also writes the model with its adapters added, to export/<step>-merged/.
    export_merged: bool = setting(default=False, may_change=True)

    def __post_init__(self) -> None:
        without_rank = changed(self, "alpha", "target_modules", "export_merged")
        require(
            self.rank is not None or not without_rank,
            f"lora.{''.join(without_rank[:1])} is set and lora.rank is not",
        )
        require(self.target_modules != (), "lora.target_modules is empty")


@settings("compute")
class ComputeSettings:
    """How the forward pass is computed; this does not change its result."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["full", "in_place", "offload", "attention", "minimal", "none"] = "full"
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
        given = {"coordinator": where, "processes": count, "process_id": number}
        ignored = [f"distributed.{name}" for name, value in given.items() if value is not None]
        require(
            self.mode != "off" or not ignored,
            f"distributed.mode is 'off', so {' and '.join(ignored)} would be ignored",
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

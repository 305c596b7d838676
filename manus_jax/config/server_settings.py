"""Settings of the server pools: the AgentGym environment servers and the vLLM servers.

Imports no JAX, so that the pools can be used without a learner.
"""

from manus_jax.config.binding import ConfigError, settings


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@settings("env_pool", may_change=True)
class EnvPoolSettings:
    """How long the pool of environment servers waits, and how often it tries. Times in seconds."""

    connect_timeout: float = 5.0
    read_timeout: float | None = None  # of one call; None: the environment's own (table.py)
    patience: float = 600.0  # waiting for a free session
    attempts: int = 2  # at an episode that infrastructure failures interrupt
    first_retry: float = 0.5  # wait after a failure; doubles with each consecutive one
    longest_retry: float = 60.0
    bad_answers: int = 3  # in a row, before a server is marked down
    broken_after: int = 4  # failures without any answer, before an embedded server is restarted
    sessions_per_server: int | None = None  # limits the memory that an environment takes
    keep_idle: float = 900.0  # an unused session is kept this long; servers expire them too
    startup_timeout: float = 60.0  # of an embedded server

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "patience", "first_retry", "longest_retry", "keep_idle"):
            value = getattr(self, name)
            _require(value > 0, f"env_pool.{name} = {value:g} must be positive")
        for name in ("read_timeout", "startup_timeout"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"env_pool.{name} = {value} must be positive")
        for name in ("attempts", "bad_answers", "broken_after", "sessions_per_server"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"env_pool.{name} = {value}: at least 1")


@settings("vllm", may_change=True, of_engine=True)
class VllmSettings:
    """The vLLM servers of `engine.name = "vllm"`. Times in seconds.

    One of `urls`, `address_file` and `servers` (or `gpus`) says where the servers are.
    """

    urls: tuple[str, ...] = ()  # servers that run elsewhere
    address_file: str | None = None  # where servers that run elsewhere write their addresses
    servers: int = 0  # servers to start on this machine; 0 with gpus: as many as the GPUs allow
    gpus: int | tuple[int | str, ...] | None = None  # GPUs for them: the last N, or by name
    tensor_parallel: int = 1  # GPUs of each server that is started
    gpu_memory_utilization: float | None = None  # vLLM's share of a GPU
    learner_memory_fraction: float | None = None  # the learner's share of its GPUs
    python: str | None = None  # vLLM's interpreter; None: MANUS_JAX_VLLM_PYTHON
    server_arguments: tuple[str, ...] = ()  # extra vLLM arguments of servers that are started
    start_timeout: float = 900.0  # for servers that are started
    weights_dir: str | None = None  # where weights are published; the servers must see it too
    push: bool = True  # False: the servers keep the weights that they have
    snapshot_every: int = 20  # versions between two full copies of the weights
    attempts: int = 4  # at one request
    queue_size: int = 4096  # requests that may wait for a server
    patience: float = 600.0  # waiting while no server is in service
    imbalance: int = 8  # extra requests on a session's server before the session moves
    check_every: float = 5.0  # between two health checks of a server
    first_retry: float = 1.0  # wait after a failure; doubles with each consecutive one
    longest_retry: float = 60.0
    check_timeout: float = 10.0  # of connecting and of health checks
    generate_timeout: float = 600.0  # of one turn
    fetch_timeout: float = 1800.0  # of reading and checking new weights
    update_timeout: float = 600.0  # of each step of loading them

    def __post_init__(self) -> None:
        if isinstance(self.gpus, tuple):
            object.__setattr__(self, "gpus", tuple(str(name) for name in self.gpus))
        for name in ("tensor_parallel", "snapshot_every", "attempts", "queue_size"):
            _require(getattr(self, name) > 0, f"vllm.{name} = {getattr(self, name)}: at least 1")
        for name in ("servers", "imbalance"):
            _require(getattr(self, name) >= 0, f"vllm.{name} must not be negative")
        retries = ("first_retry", "longest_retry")
        timeouts = ("start", "check", "generate", "fetch", "update")
        for name in ("patience", "check_every", *retries, *(f"{t}_timeout" for t in timeouts)):
            value = getattr(self, name)
            _require(value > 0, f"vllm.{name} = {value:g} must be positive")
        self._check_sources()
        self._check_gpus()

    def _check_sources(self) -> None:
        started = bool(self.servers) or self.gpus is not None
        elsewhere = [f"vllm.{name}" for name in ("urls", "address_file") if getattr(self, name)]
        _require(
            len(elsewhere) + started == 1,
            "set either vllm.urls, the addresses of servers, or vllm.address_file, where servers "
            "write them, or vllm.servers, how many to start here",
        )
        _require(
            not (elsewhere and self.push and self.weights_dir is None),
            f"{' '.join(elsewhere)} is set and vllm.weights_dir is not: name a directory that "
            "the servers see too, or set vllm.push = False to use the weights that they have",
        )
        _require(self.push or not started, "vllm.push = False, and servers started here need push")
        _require(
            not elsewhere or self.tensor_parallel == 1,
            "vllm.tensor_parallel is for servers that are started here",
        )

    def _check_gpus(self) -> None:
        for name in ("gpu_memory_utilization", "learner_memory_fraction"):
            share = getattr(self, name)
            if share is not None:
                _require(self.gpus is not None, f"vllm.{name} is set and vllm.gpus is not")
                _require(0 < share <= 1, f"vllm.{name} = {share:g} must be above 0 and at most 1")
        if self.gpus is None:
            return
        count = self.gpus if isinstance(self.gpus, int) else len(self.gpus)
        _require(count > 0, f"vllm.gpus = {self.gpus}: at least 1, or leave it out")
        if isinstance(self.gpus, tuple):
            names = ", ".join(map(str, self.gpus))
            _require(len(set(self.gpus)) == count, f"vllm.gpus names one twice: {names}")
        size = self.tensor_parallel
        _require(
            bool(self.servers) or count % size == 0,
            f"vllm.gpus: {count} GPUs are not divisible by tensor_parallel = {size}",
        )
        needed = self.servers * size
        _require(
            not self.servers or needed == count,
            f"vllm.gpus: {self.servers} servers x tensor_parallel {size} = {needed} GPUs, and "
            f"gpus gives them {count}",
        )

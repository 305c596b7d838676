"""Settings of the server pools: the AgentGym environment servers and the vLLM servers.

Imports no JAX, so that the pools can be used without a learner.
"""

from typing import Any

from manus_jax.config.binding import require, setting, settings
from manus_jax.config.vllm_options import check_options

_MAX_SECONDS = 10**6


def _seconds(default: float | None) -> Any:
    return setting(default=default, at_least=0.001, at_most=_MAX_SECONDS)


def _count(default: int | None, at_least: int = 1, at_most: int = 10**6) -> Any:
    return setting(default=default, at_least=at_least, at_most=at_most)


def _check_retries(group: str, first: float, longest: float) -> None:
    require(
        first <= longest,
        f"{group}.first_retry = {first:g} is more than {group}.longest_retry = {longest:g}",
    )


@settings("env_pool", may_change=True)
class EnvPoolSettings:
    """How long the pool of environment servers waits, and how often it tries. Times in seconds."""

    connect_timeout: float = _seconds(5.0)
    read_timeout: float | None = _seconds(None)  # of one call; None: the environment's (table.py)
    patience: float = _seconds(600.0)  # waiting for a free session
    attempts: int = _count(2)  # at an episode that infrastructure failures interrupt
    first_retry: float = _seconds(0.5)  # wait after a failure; doubles with each consecutive one
    longest_retry: float = _seconds(60.0)
    bad_answers: int = _count(3)  # in a row, before a server is marked down
    broken_after: int = _count(4)  # failures without answer, before an embedded server is restarted
    sessions_per_server: int | None = _count(None)  # limits the memory that an environment takes
    keep_idle: float = _seconds(900.0)  # an unused session is kept this long; servers expire them
    startup_timeout: float = _seconds(60.0)  # of an embedded server

    def __post_init__(self) -> None:
        _check_retries("env_pool", self.first_retry, self.longest_retry)


@settings("vllm", may_change=True, of_engine=True)
class VllmSettings:
    """The vLLM servers of `engine.name = "vllm"`. Times in seconds.

    One of `urls`, `address_file` and `servers` (or `gpus`) says where the servers are.
    """

    # Servers that run elsewhere, or where such servers write their addresses.
    urls: tuple[str, ...] = setting(default=(), text="url", distinct=True)
    address_file: str | None = setting(default=None, text="path")
    # Servers to start on this machine; 0 with gpus: as many as the GPUs allow.
    servers: int = _count(0, at_least=0, at_most=1000)
    # GPUs for them: the last N, or by name.
    gpus: int | tuple[int | str, ...] | None = _count(None, at_least=0, at_most=1000)
    tensor_parallel: int = _count(1, at_most=1000)  # GPUs of each server that is started
    # vLLM's share of a GPU, and the learner's share of its GPUs.
    gpu_memory_utilization: float | None = setting(default=None, above=0, at_most=1)
    learner_memory_fraction: float | None = setting(default=None, above=0, at_most=1)
    python: str | None = setting(default=None, text="path")  # None: MANUS_JAX_VLLM_PYTHON
    server_arguments: tuple[str, ...] = ()  # extra vLLM arguments of servers that are started
    start_timeout: float = _seconds(900.0)  # for servers that are started
    # Where weights are published; the servers must see it too.
    weights_dir: str | None = setting(default=None, text="path")
    push: bool = True  # False: the servers keep the weights that they have
    adapters: bool = True  # with LoRA, servers load adapters; False: merged weights
    # The learner computes each token with the experts that the server chose for it.
    router_replay: bool = False
    snapshot_every: int = _count(20)  # versions between two full copies of the weights
    attempts: int = _count(4)  # at one request
    queue_size: int = _count(4096)  # requests that may wait for a server
    patience: float = _seconds(600.0)  # waiting while no server is in service
    imbalance: int = _count(8, at_least=0)  # extra requests on a server before a session moves
    check_every: float = _seconds(5.0)  # between two health checks of a server
    first_retry: float = _seconds(1.0)  # wait after a failure; doubles with each consecutive one
    longest_retry: float = _seconds(60.0)
    check_timeout: float = _seconds(10.0)  # of connecting and of health checks
    generate_timeout: float = _seconds(600.0)  # of one turn
    fetch_timeout: float = _seconds(1800.0)  # of reading and checking new weights
    update_timeout: float = _seconds(600.0)  # of each step of loading them

    def __post_init__(self) -> None:
        if isinstance(self.gpus, tuple):
            object.__setattr__(self, "gpus", tuple(str(name) for name in self.gpus))
        _check_retries("vllm", self.first_retry, self.longest_retry)
        self._check_sources()
        self._check_gpus()
        check_options(self.server_arguments, "vllm.server_arguments")

    def _check_sources(self) -> None:
        started = bool(self.servers) or self.gpus is not None
        elsewhere = [f"vllm.{name}" for name in ("urls", "address_file") if getattr(self, name)]
        require(
            len(elsewhere) + started == 1,
            "set either vllm.urls, the addresses of servers, or vllm.address_file, where servers "
            "write them, or vllm.servers, how many to start here",
        )
        require(
            not (elsewhere and self.push and self.weights_dir is None),
            f"{' '.join(elsewhere)} is set and vllm.weights_dir is not: name a directory that "
            "the servers see too, or set vllm.push = False to use the weights that they have",
        )
        require(
            self.push or not started,
            "vllm.push = False is for servers that run elsewhere; those started here need weights",
        )
        require(
            not elsewhere or self.tensor_parallel == 1,
            "vllm.tensor_parallel is for servers that are started here",
        )

    def _check_gpus(self) -> None:
        for name in ("gpu_memory_utilization", "learner_memory_fraction"):
            unused = getattr(self, name) is not None and self.gpus is None
            require(not unused, f"vllm.{name} is set and vllm.gpus is not")
        if self.gpus is None:
            return
        count = self.gpus if isinstance(self.gpus, int) else len(self.gpus)
        require(count > 0, f"vllm.gpus = {self.gpus}: at least 1, or leave it out")
        if isinstance(self.gpus, tuple):
            names = ", ".join(map(str, self.gpus))
            require(len(set(self.gpus)) == count, f"vllm.gpus names one twice: {names}")
        size = self.tensor_parallel
        require(
            bool(self.servers) or count % size == 0,
            f"vllm.gpus: {count} GPUs are not divisible by tensor_parallel = {size}",
        )
        needed = self.servers * size
        require(
            not self.servers or needed == count,
            f"vllm.gpus gives vLLM {count} GPUs, and {self.servers} servers x tensor_parallel "
            f"{size} need {needed}",
        )

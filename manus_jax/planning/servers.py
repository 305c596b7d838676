"""The share of a GPU that vLLM servers get: does it hold the weights, and how many episodes?"""

import dataclasses
import math

from manus_jax.config.binding import ConfigError
from manus_jax.models.architecture import Architecture
from manus_jax.planning.chips import GIB

VLLM_MEMORY_UTILIZATION = 0.92
"""vLLM's own default of --gpu-memory-utilization."""


@dataclasses.dataclass(frozen=True)
class ServerPlan:
    """Bytes on one GPU of a server: its share, the weights, and the keys and values of a token.

    vLLM also needs memory for activations and CUDA graphs, which is not known before it starts, so
    `tokens` and `episodes` (of `length` tokens, on all GPUs of the server) are upper bounds.
    """

    share: float
    weights: float
    token: float
    length: int

    @property
    def tokens(self) -> int:
        return max(0, int((self.share - self.weights) / self.token))

    @property
    def episodes(self) -> int:
        return self.tokens // self.length


def plan_servers(
    arch: Architecture,
    gpu_memory: float,
    fraction: float,
    tensor_parallel: int,
    itemsize: int,
    length: int,
) -> ServerPlan:
    """What servers hold in `fraction` of each of their GPUs; ConfigError if that is too little.

    `itemsize`: bytes of a weight, key or value; `length`: tokens of the longest episode.
    """
    heads = max(1, arch.num_kv_heads / tensor_parallel)
    found = ServerPlan(
        share=gpu_memory * fraction,
        weights=arch.num_params * itemsize / tensor_parallel,
        token=2 * arch.num_layers * heads * arch.head_dim * itemsize,
        length=length,
    )
    if found.episodes >= 1:
        return found
    cache = length * found.token
    least = math.ceil(100 * (found.weights + cache) / gpu_memory) / 100
    larger = f"vllm.gpu_memory_utilization to at least {least:g} or " if least <= 1 else ""
    raise ConfigError(
        f"vLLM's share of a GPU, {fraction:g} x {gpu_memory / GIB:.2f} = "
        f"{found.share / GIB:.2f} GiB, does not hold weights of {found.weights / GIB:.2f} GiB "
        f"and the KV cache of an episode, {length} tokens x {found.token / 1024:g} KiB = "
        f"{cache / GIB:.2f} GiB; set {larger}"
        f"vllm.tensor_parallel to {2 * tensor_parallel}"
    )

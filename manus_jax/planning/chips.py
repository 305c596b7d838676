"""Data-sheet figures of accelerators: arithmetic, memory and links.

Sources: Google Cloud's TPU pages, the JAX scaling book and NVIDIA's data sheets; bfloat16 without
sparsity.
"""

import dataclasses
from typing import Literal

GIB = 2.0**30
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Chip:
    """FLOP/s, bytes and bytes/s of one chip.

    `usable` is the memory that XLA may allocate. `link` is one link in one direction (for NVLink:
    all links of a GPU together), `network` the share of a chip in the host's network. A torus axis
    is a ring if its length is a multiple of `wraps`. `target` holds what the CUDA compiler needs
    to know about a GPU, as the text form of XLA's GpuDeviceInfoProto.
    """

    name: str
    kind: Literal["tpu", "gpu"]
    flops: float
    usable: float
    bandwidth: float
    link: float
    network: float
    wraps: int = 0
    target: str = ""


_GPU = (
    "threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 "
    "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
    "registers_per_core_limit: 65536 registers_per_block_limit: 65536 "
    "shared_memory_per_block: 49152"
)
_AMPERE = (
    f"{_GPU} core_count: 108 fpus_per_core: 64 shared_memory_per_core: 167936 "
    "clock_rate_ghz: 1.41 shared_memory_per_block_optin: 166912 l2_cache_size: 41943040 "
    "cuda_compute_capability {major: 8 minor: 0}"
)
_HOPPER = (
    f"{_GPU} core_count: 132 fpus_per_core: 128 shared_memory_per_core: 233472 "
    "clock_rate_ghz: 1.98 shared_memory_per_block_optin: 232448 l2_cache_size: 52428800 "
    "cuda_compute_capability {major: 9 minor: 0}"
)
# `usable` as reported by the TPU compiler when a program does not fit.
TPUS = {
    "v5e": Chip("v5e", "tpu", 197e12, 15.75 * GIB, 819e9, 45e9, 3.125e9, wraps=16),
    "v5p": Chip("v5p", "tpu", 459e12, 95.74 * GIB, 2765e9, 90e9, 6.25e9, wraps=4),
    "v6e": Chip("v6e", "tpu", 918e12, 31.25 * GIB, 1640e9, 90e9, 12.5e9, wraps=16),
}
# A tenth is left for the CUDA context, cuDNN and fragmentation.
GPUS = {
    "H100": Chip("H100", "gpu", 989e12, 0.9 * 80 * GB, 3350e9, 450e9, 50e9, target=_HOPPER),
    "H200": Chip("H200", "gpu", 989e12, 0.9 * 141 * GB, 4800e9, 450e9, 50e9, target=_HOPPER),
    "A100": Chip("A100", "gpu", 312e12, 0.9 * 80 * GB, 2039e9, 300e9, 25e9, target=_AMPERE),
}
GPU_MEMORIES = {"80GB": "H100", "141GB": "H200"}

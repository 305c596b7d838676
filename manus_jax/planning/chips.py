"""Figures of accelerators: arithmetic, memory and links, and what the CUDA compiler asks for.

Arithmetic (bfloat16 without sparsity, float32 sums), bandwidth and links are those of Google
Cloud's TPU pages, the JAX scaling book and NVIDIA's data sheets. What the CUDA compiler needs to
know of A100, H100, H200 and B200 is in XLA's own descriptions (openxla/xla,
xla/backends/gpu/target_config/specs). That of L4 and RTX 4090 follows from NVIDIA's Ada white
paper, and for L4 from the memory and clock that CUDA's deviceQuery reports. The memory of the 4090
and the networks of both are assumptions without a source.
"""

import dataclasses
from typing import Literal

GIB = 2.0**30
_ACCELERATED = "feature_extension: ACCELERATED_FEATURES"  # sm_90a and sm_100a


@dataclasses.dataclass(frozen=True)
class Chip:
    """FLOP/s, bytes and bytes/s of one chip.

    `memory` is what the TPU compiler may use, or what the driver of a GPU reports. `link` is one
    link in one direction (for NVLink: all links of a GPU together; L4 and 4090 have PCIe only),
    `network` the share of a chip in the host's network. A torus axis is a ring if its length is a
    multiple of `wraps`. `target` describes a GPU in the text form of XLA's GpuDeviceInfoProto.
    """

    name: str
    kind: Literal["tpu", "gpu"]
    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    wraps: int = 0
    target: str = ""


def _target(
    cores: int, units: int, threads: int, shared: int, clock: float, cache: int, capability: str
) -> str:
    """What distinguishes GPUs: multiprocessors, and of each its float32 units, threads and shared
    memory; clock in GHz, L2 cache, compute capability."""
    return (
        "threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 "
        "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
        "registers_per_core_limit: 65536 registers_per_block_limit: 65536 "
        f"core_count: {cores} fpus_per_core: {units} threads_per_core_limit: {threads} "
        f"shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared - 1024} "
        f"clock_rate_ghz: {clock} l2_cache_size: {cache} cuda_compute_capability {{ {capability} }}"
    )


_HOPPER = _target(132, 128, 2048, 233472, 1.98, 52428800, f"major: 9 {_ACCELERATED}")
_BLACKWELL = _target(148, 128, 2048, 233472, 1.965, 132644864, f"major: 10 {_ACCELERATED}")
_AMPERE = _target(108, 64, 2048, 167936, 1.41, 41943040, "major: 8")
_L4 = _target(58, 128, 1536, 102400, 2.04, 50331648, "major: 8 minor: 9")
_4090 = _target(128, 128, 1536, 102400, 2.52, 75497472, "major: 8 minor: 9")

# `memory` as reported by the TPU compiler when a program does not fit.
TPUS = {
    "v5e": Chip("v5e", "tpu", 197e12, 15.75 * GIB, 819e9, 45e9, 3.125e9, wraps=16),
    "v5p": Chip("v5p", "tpu", 459e12, 95.74 * GIB, 2765e9, 90e9, 6.25e9, wraps=4),
    "v6e": Chip("v6e", "tpu", 918e12, 31.25 * GIB, 1640e9, 90e9, 12.5e9, wraps=16),
}
GPUS = {
    "H100": Chip("H100", "gpu", 989e12, 84942979072, 3350e9, 450e9, 50e9, target=_HOPPER),
    "H200": Chip("H200", "gpu", 989e12, 151397597184, 4800e9, 450e9, 50e9, target=_HOPPER),
    "A100": Chip("A100", "gpu", 312e12, 85100068864, 2039e9, 300e9, 25e9, target=_AMPERE),
    "B200": Chip("B200", "gpu", 2250e12, 191514411008, 7672e9, 900e9, 50e9, target=_BLACKWELL),
    "L4": Chip("L4", "gpu", 121e12, 23583784960, 300e9, 32e9, 3.125e9, target=_L4),
    "4090": Chip("4090", "gpu", 165e12, 23.65 * GIB, 1008e9, 32e9, 3.125e9, target=_4090),
}
GPU_MEMORIES = {"80GB": "H100", "141GB": "H200", "180GB": "B200"}

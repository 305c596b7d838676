"""Accelerators by their data sheets: arithmetic, memory, links.

The numbers are the makers' public ones (Google Cloud's TPU pages and the JAX scaling book,
NVIDIA's data sheets), bfloat16 without sparsity. `usable` memory is what XLA may hand out, a
little less than what is soldered on (for TPUs, as libtpu's compiler says when it runs out).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

GIB = 2.0**30
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Chip:
    """FLOP/s, bytes and bytes/s of one chip.

    `link` is one link in one direction (of NVLink, all of a GPU's together), `network` what a chip
    has of its host's data-centre network. `wraps` is the length whose multiples close a torus axis
    into a ring.
    """

    name: str
    kind: Literal["tpu", "gpu"]
    flops: float
    usable: float
    bandwidth: float
    link: float
    network: float
    wraps: int = 0


TPUS = {
    "v5e": Chip("v5e", "tpu", 197e12, 15.75 * GIB, 819e9, 45e9, 3.125e9, wraps=16),
    "v5p": Chip("v5p", "tpu", 459e12, 95.74 * GIB, 2765e9, 90e9, 6.25e9, wraps=4),
    "v6e": Chip("v6e", "tpu", 918e12, 31.25 * GIB, 1640e9, 90e9, 12.5e9, wraps=16),
}
# A tenth is left to the CUDA context, cuDNN and the allocator's gaps.
GPUS = {
    "H100": Chip("H100", "gpu", 989e12, 0.9 * 80 * GB, 3350e9, 450e9, 50e9),
    "H200": Chip("H200", "gpu", 989e12, 0.9 * 141 * GB, 4800e9, 450e9, 50e9),
    "A100": Chip("A100", "gpu", 312e12, 0.9 * 80 * GB, 2039e9, 300e9, 25e9),
}
GPU_MEMORIES = {"80GB": "H100", "141GB": "H200"}


def group_bandwidth(chip: Chip, members: Sequence[Any], shape: Sequence[int], node: int) -> float:
    """Bytes/s at which each of the devices `members` can send to the others.

    On a TPU slice of this `shape`, a link along each torus axis that the group extends over, both
    directions where it goes all the way round a ring; between slices, the network. On GPUs NVLink
    within a machine of `node`, the network beyond it.
    """
    if chip.kind == "gpu":
        machines = {position // node for position in members}
        return chip.link if len(machines) == 1 else chip.network
    if len({getattr(d, "slice_index", 0) for d in members}) > 1:
        return chip.network
    total = 0.0
    for axis, length in enumerate(shape):
        extent = len({d.coords[axis] for d in members})
        if extent > 1:
            ring = extent == length and length % chip.wraps == 0
            total += chip.link * (2 if ring else 1)
    return total or chip.link

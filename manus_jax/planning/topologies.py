"""Topology names (`v5e:8x8`, `cuda:8x80GB`) and the devices to compile for; no accelerator needed.

libtpu describes TPU devices and JAX's CUDA plug-in GPU devices, and both compile for them. Without
the package, CPU devices stand in: the program is lowered for the platform but not compiled.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from manus_jax.accelerators import GPU_MEMORY_FRACTION
from manus_jax.config.binding import ConfigError
from manus_jax.planning.chips import GPU_MEMORIES, GPUS, TPUS, Chip

_EXAMPLES = "v5e:8x8, v5p:2x2x4, v6e:4x4, cuda:8x80GB, cuda:4x8xA100"
_MAX_CHIPS = 2**14
_SQUARES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
# libtpu looks for the metadata of a TPU host and locks the chips; neither exists here.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


class TopologyError(ConfigError):
    """An unknown or impossible topology."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """`shape` is the torus of one TPU slice, or (machines, GPUs per machine).

    `devices` is empty if JAX was started with fewer CPU devices than the topology needs.
    `memory_fraction` is the share of a chip's memory that XLA may allocate.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int
    devices: tuple[Any, ...]
    compiles: bool
    memory_fraction: float = 1.0

    @property
    def count(self) -> int:
        return math.prod(self.shape) * self.slices

    @property
    def processes(self) -> int:
        """Hosts, each with one process; a TPU host is taken to have four chips if not known."""
        if self.compiles:
            return len({d.process_index for d in self.devices})
        return self.shape[0] if self.chip.kind == "gpu" else max(1, self.count // 4)

    @property
    def usable(self) -> float:
        """Bytes that XLA may allocate on a chip."""
        return self.chip.memory * self.memory_fraction

    @property
    def platform(self) -> str:
        """The platform's name in JAX's lowering."""
        return "tpu" if self.chip.kind == "tpu" else "cuda"

    def bandwidth(self, group: Sequence[Any]) -> float:
        """Bytes/s that each device of a group can send to the others.

        TPU devices of one slice use one link per torus axis that the group extends over, in both
        directions where the axis is a ring; CPU devices that stand in for them have no place in
        the torus. GPUs use NVLink inside a machine. Other groups use the network.
        """
        chip = self.chip
        if chip.kind == "gpu":
            machines = {d.id // self.shape[-1] for d in group}
            return chip.link if len(machines) == 1 else chip.network
        if not self.compiles:
            return chip.link * min(len(self.shape), max(1, len(group) // 4))
        if len({getattr(d, "slice_index", 0) for d in group}) > 1:
            return chip.network
        total = 0.0
        for axis, length in enumerate(self.shape):
            extent = len({d.coords[axis] for d in group})
            if extent > 1:
                total += chip.link * (2 if extent == length and length % chip.wraps == 0 else 1)
        return total or chip.link


def find_topology(name: str, slices: int = 1, gpu_memory: float | None = None) -> Topology:
    """The topology with this name; `slices` TPU slices are joined by a data-centre network.

    `gpu_memory` is the share of a GPU's memory that the run gives to JAX, if it says so.
    """
    kind, _, rest = name.partition(":")
    if kind == "cuda":
        chip, shape, compiles = *_parse_cuda(name, rest), has_cuda_compiler()
    elif kind not in TPUS:
        raise TopologyError(
            f"unknown topology {name!r}: there are {', '.join(TPUS)} and cuda, as in {_EXAMPLES}"
        )
    elif not re.fullmatch(r"\d+(x\d+){1,2}", rest):
        raise TopologyError(f"topology {name!r} needs the chips per axis, as in {_EXAMPLES}")
    else:
        chip, shape = TPUS[kind], tuple(int(n) for n in rest.split("x"))
        compiles = has_tpu_compiler()
    chips = math.prod(shape) * slices
    if not 0 < chips <= _MAX_CHIPS:
        raise TopologyError(f"topology {name!r} has {chips} chips, not 1 to {_MAX_CHIPS}")
    if kind == "cuda" and slices > 1:
        raise TopologyError(f"{name} has no slices; write machines as in cuda:4x8x80GB")
    devices = _described(name, chip, shape, slices) if compiles else _stand_ins(math.prod(shape))
    fraction = (gpu_memory or GPU_MEMORY_FRACTION) if chip.kind == "gpu" else 1.0
    return Topology(name, chip, shape, slices, devices, compiles, fraction)


def has_tpu_compiler() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def has_cuda_compiler() -> bool:
    """Whether JAX's CUDA plug-in is installed in the version of JAX, and NVIDIA's assembler."""
    try:
        if importlib.metadata.version("jax-cuda13-plugin") != jax.__version__:
            return False
    except importlib.metadata.PackageNotFoundError:
        return False
    nvidia = importlib.util.find_spec("nvidia")
    folders = (nvidia.submodule_search_locations or ()) if nvidia else ()
    return any(Path(f, "cu13/bin/ptxas").exists() for f in folders) or bool(shutil.which("ptxas"))


def missing_compiler(topology: Topology) -> str:
    """What to install so that a topology is compiled instead of estimated."""
    what = "libtpu" if topology.platform == "tpu" else "JAX's CUDA plug-in (with nvidia-cuda-nvcc)"
    return (
        f"{what} is not installed in the version that belongs to jax, so this is an estimate: "
        "pip install 'manus-jax[plan]'"
    )


def _parse_cuda(name: str, rest: str) -> tuple[Chip, tuple[int, ...]]:
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)x(\w+)", rest)
    known = {**{m: GPUS[g] for m, g in GPU_MEMORIES.items()}, **GPUS}
    if not found or found[3] not in known:
        raise TopologyError(
            f"topology {name!r}: cuda takes [machines x] GPUs x one of {', '.join(known)}, "
            "as in cuda:8x80GB or cuda:4x8xA100"
        )
    return known[found[3]], (int(found[1] or 1), int(found[2]))


def _described(name: str, chip: Chip, shape: tuple[int, ...], slices: int) -> tuple[Any, ...]:
    """The devices of a topology as its compiler describes them."""
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    platform = "tpu"
    if chip.kind == "gpu":
        platform = "cuda"
        memory = f"memory_bandwidth: {chip.bandwidth:.0f} device_memory_size: {chip.memory:.0f}"
        options["topology"] = "x".join(str(n) for n in (1, *shape))
        options["target_config"] = (
            f'gpu_device_info {{ {chip.target} {memory} }} platform_name: "CUDA" '
            "dnn_version_info { major: 9 minor: 10 } runtime_version { major: 13 } "
            f'device_description_str: "{chip.name}"'
        )
    else:
        for key, value in _TPU_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
    try:
        return tuple(topologies.get_topology_desc(name, platform=platform, **options).devices)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split()).split("=== ")[0]
        raise TopologyError(f"topology {name!r}: {reason}{_nearest_slices(chip, shape)}") from None


def _nearest_slices(chip: Chip, shape: tuple[int, ...]) -> str:
    """The TPU slices that Google Cloud offers with the next smaller and larger number of chips."""
    if chip.kind == "gpu":
        return ""
    wanted = math.prod(shape)
    slices = {_chips(layout): layout for layout in (_CUBES if chip.name == "v5p" else _SQUARES)}
    below = [n for n in slices if n <= wanted][-1:]
    above = [n for n in slices if n > wanted][:1]
    offered = " or ".join(f"{chip.name}:{slices[n]}" for n in below + above)
    return f"; the nearest slices are {offered}"


def _chips(layout: str) -> int:
    return math.prod(int(n) for n in layout.split("x"))


def _stand_ins(count: int) -> tuple[Any, ...]:
    """As many CPU devices, or none if JAX is already running with fewer."""
    forced = re.search(r"host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if count > int(forced[1] if forced else 1):
        with contextlib.suppress(RuntimeError):  # JAX is already running
            jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    return tuple(devices[:count]) if len(devices) >= count else ()

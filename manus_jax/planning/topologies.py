"""Names of machines that are not there (`v5e:8x8`, `cuda:8x80GB`) into devices to plan for.

TPU devices are described by libtpu, which also compiles for them. There is no such thing for
GPUs: CPU devices stand in while the program is lowered, and nothing is compiled.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from manus_jax.config.binding import ConfigError
from manus_jax.planning.chips import GPU_MEMORIES, GPUS, TPUS, Chip

_EXAMPLES = "v5e:8x8, v5p:2x2x4, v6e:4x4, cuda:8x80GB, cuda:4x8xA100"


class TopologyError(ConfigError):
    """A topology that there is not, with those that there are."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """`shape` is the torus of one slice, or (machines, GPUs of each).

    `devices` is empty where nothing can describe them; then there is only an estimate.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int
    devices: tuple[Any, ...]
    compiles: bool

    @property
    def count(self) -> int:
        return math.prod(self.shape) * self.slices

    @property
    def platform(self) -> str:
        """As JAX names it when it lowers."""
        return "tpu" if self.chip.kind == "tpu" else "cuda"


def find_topology(name: str, slices: int = 1) -> Topology:
    """The machine that `name` stands for, `slices` times, joined by a data-centre network."""
    kind, _, rest = name.partition(":")
    if kind == "cuda":
        return _cuda(name, rest)
    if kind not in TPUS:
        raise TopologyError(
            f"unknown topology {name!r}: there are {', '.join(TPUS)} and cuda, as in {_EXAMPLES}"
        )
    if not re.fullmatch(r"\d+(x\d+){1,2}", rest):
        raise TopologyError(f"topology {name!r} gives no chips per axis, as in {_EXAMPLES}")
    shape = tuple(int(n) for n in rest.split("x"))
    if not has_tpu_compiler():
        return Topology(name, TPUS[kind], shape, slices, _stand_ins(math.prod(shape)), False)
    return Topology(name, TPUS[kind], shape, slices, _tpu_devices(name, slices), True)


def has_tpu_compiler() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def _tpu_devices(name: str, slices: int) -> tuple[Any, ...]:
    # libtpu looks for a TPU host's metadata and complains at length where there is none; and it
    # keeps other processes from a chip that nobody touches here.
    for key, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
    }.items():
        os.environ.setdefault(key, value)
    options = {"num_slices": slices} if slices > 1 else {}
    try:
        described = topologies.get_topology_desc(name, platform="tpu", **options)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split()).split("=== ")[0]
        raise TopologyError(f"topology {name!r}: {reason}") from None
    return tuple(described.devices)


def _cuda(name: str, rest: str) -> Topology:
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)x(\w+)", rest)
    known = {**{m: GPUS[g] for m, g in GPU_MEMORIES.items()}, **GPUS}
    if not found or found[3] not in known:
        raise TopologyError(
            f"topology {name!r}: cuda takes [machines x] GPUs x one of {', '.join(known)}, "
            "as in cuda:8x80GB or cuda:4x8xA100"
        )
    shape = (int(found[1] or 1), int(found[2]))
    return Topology(name, known[found[3]], shape, 1, _stand_ins(math.prod(shape)), False)


def _stand_ins(count: int) -> tuple[Any, ...]:
    """CPU devices to lower for: as many as are asked for, if JAX has not started with fewer."""
    forced = re.search(r"host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if count > int(forced[1] if forced else 1):
        with contextlib.suppress(RuntimeError):  # JAX runs already
            jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    return tuple(devices[:count]) if len(devices) >= count else ()

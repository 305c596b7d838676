"""One machine's GPUs, shared out between the learner and the vLLM servers that it starts.

A process sees the GPUs that CUDA_VISIBLE_DEVICES names, and nothing else keeps two of them off the
same one. Who gets which is settled here, by arithmetic alone, before any process has looked.
"""

import dataclasses
import os
import subprocess
from collections.abc import Sequence

from manus_jax.engines.protocol import EngineError

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
LEARNER_MEMORY_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"  # PCI_BUS_ID: CUDA then counts as nvidia-smi does


@dataclasses.dataclass(frozen=True)
class GpuSplit:
    """GPUs by the names that CUDA_VISIBLE_DEVICES takes; `servers` has a group for each server."""

    learner: tuple[str, ...]
    servers: tuple[tuple[str, ...], ...]

    @property
    def taken(self) -> tuple[str, ...]:
        """All of the servers' GPUs, in the order of the servers."""
        return tuple(gpu for group in self.servers for gpu in group)


def visible_gpus() -> tuple[str, ...]:
    """What this process may use: as CUDA_VISIBLE_DEVICES says, else all that nvidia-smi finds."""
    given = os.environ.get(VISIBLE_VARIABLE)
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip() not in ("", "-1"))
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return ()
    return tuple(asked.stdout.split()) if asked.returncode == 0 else ()


def group_gpus(gpus: Sequence[str], servers: int, tensor_parallel: int) -> list[tuple[str, ...]]:
    """Each server's GPUs; EngineError unless they come out even. 0 servers: as many as there are
    groups."""
    if not servers:
        if len(gpus) % tensor_parallel:
            raise EngineError(
                f"engine.options: {len(gpus)} GPUs are not divisible by tensor_parallel = "
                f"{tensor_parallel}"
            )
        servers = len(gpus) // tensor_parallel
    if servers * tensor_parallel != len(gpus):
        raise EngineError(
            f"engine.options: {servers} servers x tensor_parallel {tensor_parallel} = "
            f"{servers * tensor_parallel} GPUs, and gpus gives them {len(gpus)}"
        )
    return [tuple(gpus[n * tensor_parallel : (n + 1) * tensor_parallel]) for n in range(servers)]


def split_gpus(
    visible: Sequence[str],
    wanted: int | Sequence[str],
    servers: int,
    tensor_parallel: int,
    shared: bool = False,
) -> GpuSplit:
    """`wanted` GPUs, a number of them or their names, to the servers and the rest to the learner.

    A number takes the last ones. With `shared` the servers may take all of them, and the learner
    then has the same ones.
    """
    if isinstance(wanted, int):
        names = tuple(visible[len(visible) - wanted :]) if wanted <= len(visible) else ()
        count = wanted
    else:
        names, count = tuple(wanted), len(wanted)
        if missing := [name for name in names if name not in visible]:
            raise EngineError(
                f"engine.options gives vLLM the GPU {missing[0]}; this process sees "
                f"{', '.join(visible) or 'none'}"
            )
    if count > len(visible):
        raise EngineError(
            f"engine.options gives vLLM {count} GPUs, and this process sees {len(visible)}: "
            f"{', '.join(visible) or f'nvidia-smi finds none, and {VISIBLE_VARIABLE} names none'}"
        )
    rest = tuple(name for name in visible if name not in names)
    if not rest and not shared:
        raise EngineError(
            f"engine.options gives vLLM {count} of {len(visible)} GPUs, which leaves "
            f"{len(visible) - count} for the learner: give fewer, or share them by "
            "gpu_memory_utilization and learner_memory_fraction"
        )
    return GpuSplit(rest or tuple(visible), tuple(group_gpus(names, servers, tensor_parallel)))

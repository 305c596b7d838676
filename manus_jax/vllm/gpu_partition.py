"""Splits one machine's GPUs between the learner and the vLLM servers that it starts.

A process sees the GPUs that CUDA_VISIBLE_DEVICES names. The split is computed before any process
initialises CUDA, because nothing else prevents two processes from using the same GPU.
"""

import dataclasses
import os
import subprocess
from collections.abc import Sequence

from manus_jax.engines.protocol import EngineError

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
LEARNER_MEMORY_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"  # PCI_BUS_ID: CUDA numbers GPUs as nvidia-smi does


@dataclasses.dataclass(frozen=True)
class GpuSplit:
    """GPUs by their names in CUDA_VISIBLE_DEVICES; `servers` has one group per server."""

    learner: tuple[str, ...]
    servers: tuple[tuple[str, ...], ...]

    @property
    def taken(self) -> tuple[str, ...]:
        """All GPUs of the servers, in the order of the servers."""
        return tuple(gpu for group in self.servers for gpu in group)


def visible_gpus() -> tuple[str, ...]:
    """The GPUs in CUDA_VISIBLE_DEVICES; if it is not set, all that nvidia-smi lists."""
    given = os.environ.get(VISIBLE_VARIABLE)
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip() not in ("", "-1"))
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return ()
    return tuple(listed.stdout.split()) if listed.returncode == 0 else ()


def group_gpus(gpus: Sequence[str], tensor_parallel: int) -> list[tuple[str, ...]]:
    """One group of `tensor_parallel` GPUs per server; VllmSettings checks divisibility."""
    starts = range(0, len(gpus), tensor_parallel)
    return [tuple(gpus[start : start + tensor_parallel]) for start in starts]


def split_gpus(
    visible: Sequence[str],
    wanted: int | Sequence[int | str],
    tensor_parallel: int,
    shared: bool = False,
) -> GpuSplit:
    """Gives `wanted` GPUs, a number or names, to the servers and the rest to the learner.

    A number selects the last GPUs. With `shared` the servers may take all GPUs, and the learner
    then uses the same ones.
    """
    if isinstance(wanted, int):
        names = tuple(visible[len(visible) - wanted :]) if wanted <= len(visible) else ()
        count = wanted
    else:
        names, count = tuple(str(name) for name in wanted), len(wanted)
        if missing := [name for name in names if name not in visible]:
            raise EngineError(
                f"vllm.gpus gives vLLM the GPU {missing[0]}; this process sees "
                f"{', '.join(visible) or 'none'}"
            )
    if count > len(visible):
        raise EngineError(
            f"vllm.gpus gives vLLM {count} GPUs, and this process sees {len(visible)}: "
            f"{', '.join(visible) or f'nvidia-smi finds none, and {VISIBLE_VARIABLE} names none'}"
        )
    rest = tuple(name for name in visible if name not in names)
    if not rest and not shared:
        raise EngineError(
            f"vllm.gpus gives vLLM {count} of {len(visible)} GPUs, which leaves "
            f"{len(visible) - count} for the learner: give fewer, or share them by setting "
            "vllm.gpu_memory_utilization and vllm.learner_memory_fraction"
        )
    return GpuSplit(rest or tuple(visible), tuple(group_gpus(names, tensor_parallel)))

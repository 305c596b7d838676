"""Splits one machine's GPUs between the learner and the vLLM servers that it starts.

A process sees the GPUs that CUDA_VISIBLE_DEVICES names. The split is computed before any process
initialises CUDA, because nothing else prevents two processes from using the same GPU.
"""

import argparse
import dataclasses
import os
import re
import subprocess
from collections.abc import Sequence

from manus_jax.config.server_settings import VllmSettings
from manus_jax.engines.protocol import EngineError

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"  # PCI_BUS_ID: CUDA numbers GPUs as nvidia-smi does


def gpu_names(text: str) -> str:
    """The text, if it is a list for CUDA_VISIBLE_DEVICES; else ArgumentTypeError, for argparse."""
    names = text.split(",")
    if not all(re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", name) for name in names):
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not a list of GPUs such as 4,5")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text[:100]!r} names a GPU twice")
    return text


def visible_gpus() -> tuple[str, ...]:
    """The GPUs in CUDA_VISIBLE_DEVICES; if it is not set, all that nvidia-smi lists."""
    given = os.environ.get(VISIBLE_VARIABLE)
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip() not in ("", "-1"))
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(listed.stdout.split()) if listed.returncode == 0 else ()


def claim_gpus(settings: VllmSettings) -> VllmSettings:
    """Reserves the GPUs of vLLM servers; returns the settings with those GPUs by name.

    JAX reads the environment when it initialises its back end, so this must be called earlier.
    """
    if settings.gpus is None:
        return settings
    vllm, learner = settings.gpu_memory_utilization, settings.learner_memory_fraction
    visible = visible_gpus()
    shared = vllm is not None and learner is not None
    learner_gpus, server_gpus = split_gpus(visible, settings.gpus, shared)
    if set(learner_gpus) & set(server_gpus):
        assert vllm is not None and learner is not None
        if vllm + learner > 1:
            raise EngineError(
                f"vllm.gpus: learner and vLLM share all {len(visible)} GPUs, and "
                f"gpu_memory_utilization {vllm:g} + learner_memory_fraction {learner:g} = "
                f"{vllm + learner:g} exceeds the memory of each"
            )
    os.environ[VISIBLE_VARIABLE] = ",".join(learner_gpus)
    os.environ.setdefault(ORDER_VARIABLE, "PCI_BUS_ID")
    if learner is not None:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{learner:g}"
    return dataclasses.replace(settings, gpus=server_gpus)


def group_gpus(gpus: Sequence[str], tensor_parallel: int) -> list[tuple[str, ...]]:
    """One group of `tensor_parallel` GPUs per server; VllmSettings checks divisibility."""
    starts = range(0, len(gpus), tensor_parallel)
    return [tuple(gpus[start : start + tensor_parallel]) for start in starts]


def split_gpus(
    visible: Sequence[str], requested: int | Sequence[int | str], shared: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(GPUs of the learner, GPUs of the servers); `requested` is a number or names.

    A number selects the last GPUs. With `shared` the servers may take all GPUs, and the learner
    then uses the same ones.
    """
    if isinstance(requested, int):
        names = tuple(visible[len(visible) - requested :]) if requested <= len(visible) else ()
        count = requested
    else:
        names, count = tuple(str(name) for name in requested), len(requested)
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
    return rest or tuple(visible), names

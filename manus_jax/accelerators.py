"""Prepares the process for JAX's accelerator plug-ins, before JAX starts them."""

import os
import sys
from pathlib import Path

GPU_MEMORY_FRACTION = 0.9
"""The share of a GPU that JAX allocates; the rest is for the CUDA context, cuDNN and NCCL."""
_FRACTION_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
# Device files of NVIDIA GPUs (also Tegra and WSL), AMD GPUs and TPUs.
_DEVICE_FILES = ("nvidia*", "nvgpu*", "nvhost*", "dxg", "kfd", "accel*", "vfio/*")


def prepare_accelerators(devices: Path = Path("/dev")) -> None:
    """Sets what JAX reads when it starts, unless the user did.

    JAX would take 0.75 of a GPU's memory. On a machine without accelerators, the plug-ins may still
    be installed to compile plans; JAX would try to start them and print why it cannot.
    """
    if not any(name in os.environ for name in _FRACTION_VARIABLES):
        os.environ[_FRACTION_VARIABLES[0]] = f"{GPU_MEMORY_FRACTION:g}"
    found = any(any(devices.glob(pattern)) for pattern in _DEVICE_FILES)
    if sys.platform == "linux" and not found and not os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules:  # which has read the variable already
            sys.modules["jax"].config.update("jax_platforms", "cpu")

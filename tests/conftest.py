"""Eight virtual CPU devices for every test, set before anything imports JAX, and common fixtures.

Test models are tiny and most of their time is compilation, so XLA optimises less and uses the CPU
emitters that are faster to compile, and the programs of one worker and of the processes it starts
share a compilation cache.
"""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
    )
).strip()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # set in pytest's first process, before workers
    compiled = tempfile.mkdtemp(prefix="compiled_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # two writers of one entry could meet
    os.environ["JAX_COMPILATION_CACHE_DIR"] += f"/{worker}"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Workers and the processes that they start import the same modules, whose asserts pytest rewrites:
# compiled once, also where containers switch bytecode off.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell starts background jobs with SIGINT ignored, which the tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# On a loaded machine an example may take any time.
settings.register_profile("no_deadline", deadline=None)
if "CI" not in os.environ:  # where hypothesis has no deadline and fixed examples by default
    settings.load_profile("no_deadline")

INTEGRATION = Path(__file__).parent / "integration"
ALWAYS_SLOW = ("smollm2", "vllm", "java", "tokenizers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what starts processes by its location, or needs a real model or simulator."""
    for item in items:
        if INTEGRATION in item.path.parents or any(map(item.get_closest_marker, ALWAYS_SLOW)):
            item.add_marker(pytest.mark.slow)

"""Eight virtual CPU devices for every test, set before anything imports JAX, and common fixtures.

Test models are tiny and most of their time is compilation, so LLVM optimises less.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    )
).strip()
# A shell starts background jobs with SIGINT ignored, which the tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

INTEGRATION = Path(__file__).parent / "integration"
ALWAYS_SLOW = ("smollm2", "vllm", "java")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what starts processes by its location, or needs a real model or simulator."""
    for item in items:
        if INTEGRATION in item.path.parents or any(map(item.get_closest_marker, ALWAYS_SLOW)):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A compilation cache for a file whose programs have the same shapes repeatedly."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()

"""benchmarks/async.py: the simulated controllers keep an engine busy despite failures."""

import importlib.util
from pathlib import Path

import pytest

from manus_jax.rollout.concurrency import Concurrency

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "async.py"


def test_with_failing_and_hanging_episodes_the_engine_is_busy_nine_tenths_of_the_time():
    spec = importlib.util.spec_from_file_location("async_benchmark", SCRIPT)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    run = benchmark.Simulation(Concurrency.between(256, 4096), failing=0.10, hanging=0.01)
    run.run(updates=40)
    assert run.admission.taken >= 40
    assert run.share_of_ideal >= 0.9

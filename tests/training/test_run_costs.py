"""Time and memory of a run, continued when it is resumed."""

import resource

import numpy as np
import pytest

from manus_jax.status import STATUS
from manus_jax.training.timer import RunCosts


def test_minutes_of_a_resumed_run_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    now = STATUS.began + 90
    monkeypatch.setattr("time.time", lambda: now)
    monkeypatch.setattr("time.process_time", lambda: 30.0)
    whole, processor = "perf/minutes", "perf/processor_minutes"
    costs = RunCosts([]).metrics()
    assert (costs[whole], costs[processor]) == pytest.approx((1.5, 0.5))
    past = [{"step": 1, whole: 2.0, processor: 1.0}, {"step": 2, whole: 4.0, processor: 3.0}]
    costs = RunCosts(past).metrics()
    assert (costs[whole], costs[processor]) == pytest.approx((5.5, 3.5))
    costs = RunCosts([{"step": 1}]).metrics()
    assert (costs[whole], costs[processor]) == pytest.approx((1.5, 0.5))


@pytest.mark.slow
def test_peak_memory_is_the_highest_of_all_starts() -> None:
    taken = np.ones(50_000_000)  # 0.4 GB
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    measured = RunCosts([]).metrics()["perf/max_memory_gb"]
    assert taken.nbytes / 1e9 < measured == pytest.approx(kilobytes * 1024 / 1e9, rel=0.05)
    before = [{"step": 1, "perf/max_memory_gb": 1000.0}]
    assert RunCosts(before).metrics()["perf/max_memory_gb"] == 1000.0

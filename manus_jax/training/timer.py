"""Measures the time of each phase of a step, which is also visible in a profile, and what a run
costs: time and memory. Profiles single steps."""

import contextlib
import resource
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import jax

from manus_jax.status import STATUS
from manus_jax.timeline import TIMELINE


class Timer:
    """Seconds per phase of one step; `other` is the time outside all phases."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        with (
            STATUS.phase(name),
            jax.profiler.TraceAnnotation(name),
            TIMELINE.span("learner", name),
        ):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def metrics(self) -> dict[str, float]:
        step = time.monotonic() - self._began
        other = step - sum(self.seconds.values())
        phases = {**self.seconds, "other": other, "step": step}
        return {f"timing_s/{name}": seconds for name, seconds in phases.items()}


@contextlib.contextmanager
def profiled(step: int, steps: Collection[int], run: Path) -> Iterator[None]:
    """Writes a trace of the block to `profile/<step>` if the step is one of `steps`."""
    if step not in steps:
        yield
        return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a rollout makes too many calls
    folder = run / "profile" / str(step)
    with (
        jax.profiler.trace(folder, create_perfetto_trace=True, profiler_options=options),
        jax.profiler.StepTraceAnnotation("train", step_num=step),
    ):
        yield


class RunCosts:
    """Time and peak memory of a run, over all its starts; `past` are its metrics so far."""

    def __init__(self, past: Sequence[Mapping[str, float]]) -> None:
        self._past = past[-1] if past else {}

    def metrics(self) -> dict[str, float]:
        """Times include the start of the process and the warm start, but not other processes."""
        taken = {
            "perf/minutes": (time.time() - STATUS.began) / 60,
            "perf/processor_minutes": time.process_time() / 60,
        }
        sums = {name: self._past.get(name, 0.0) + value for name, value in taken.items()}
        memory = max(self._past.get("perf/max_memory_gb", 0.0), _peak_bytes() / 1e9)
        return {**sums, "perf/max_memory_gb": memory}


def _peak_bytes() -> float:
    """The peak memory of the fullest local device; on a CPU, that of the process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max((float(s.get("peak_bytes_in_use", 0)) for s in stats), default=0.0)
    unit = 1 if sys.platform == "darwin" else 1024
    return peak or float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)

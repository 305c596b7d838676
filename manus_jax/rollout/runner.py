"""Runs many episodes concurrently and returns their outcomes in order.

Each episode in flight has its own thread, which mostly waits for I/O; the pool's leases limit
concurrency. An exception in an episode is logged and turns that episode into a FailedEpisode,
without affecting the others.
"""

import contextlib
import logging
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.table import environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.cancellation import Cancellation
from manus_jax.errors import UserError
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.episode import play_episode
from manus_jax.rollout.player import Agent
from manus_jax.rollout.trajectory import EpisodeSpec, FailedEpisode, Outcome
from manus_jax.status import STATUS

_log = logging.getLogger(__name__)

STACK_BYTES = 1 << 20
"""Stack size of an episode thread; thousands of 8 MiB stacks exceed address-space limits."""

GRACE = 10.0
"""Seconds to wait for cancelled episodes to release their environments; slower ones end with their
own timeouts."""

_POLL = 0.1

OnDone = Callable[[int, Outcome], None]
"""Called with a spec's index and its outcome, in the caller's thread, when an episode ends."""


class ThreadLimit(UserError, RuntimeError):
    """The system does not start as many threads as episodes are to be played at once."""


def run_episodes(
    specs: Sequence[EpisodeSpec],
    agent: Agent,
    pool: EnvironmentPool,
    settings: RolloutSettings,
    on_done: OnDone | None = None,
    stop: threading.Event | None = None,
) -> list[Outcome]:
    """Plays all episodes and returns their outcomes in the order of `specs`.

    When `stop` is set, episodes in flight are cancelled, their environments are released, and
    unfinished episodes become FailedEpisode "cancelled". Ctrl-C and exceptions in `on_done` also
    cancel the episodes and are then re-raised. Raises ValueError for specs that cannot be played,
    before any episode starts.
    """
    check_specs(specs, agent, pool, settings)
    run = _Run(specs, agent, pool, settings)
    try:
        run.start()
        run.collect(on_done, stop)
    except BaseException:
        run.cancel()
        raise
    return run.outcomes()


def check_specs(
    specs: Sequence[EpisodeSpec], agent: Agent, pool: EnvironmentPool, settings: RolloutSettings
) -> None:
    """Raises ValueError unless every spec names an item that the agent can play in an open pool."""
    if len({spec.uid for spec in specs}) < len(specs):
        raise ValueError("two episodes have the same uid; they would draw the same random numbers")
    for spec in specs:
        if spec.task.env is None or spec.task.item is None:
            raise ValueError(f"{spec.uid}: task {spec.task.item_id!r} names no environment's item")
    for env in {spec.task.env for spec in specs if spec.task.env is not None}:
        row = environment(env)
        if env not in pool.environments:
            there = ", ".join(pool.environments) or "none"
            raise ValueError(f"environment {env!r} is not open; open are: {there}")
        format_for(row, settings.action_format)
        agent.check(env, settings)


class _Run:
    """The state of one `run_episodes` call."""

    def __init__(
        self,
        specs: Sequence[EpisodeSpec],
        agent: Agent,
        pool: EnvironmentPool,
        settings: RolloutSettings,
    ) -> None:
        self._specs = specs
        self._agent, self._pool, self._settings = agent, pool, settings
        self._cancellation = Cancellation()
        self._threads = max(1, min(settings.max_in_flight, len(specs)))
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="episode")
        self._ended: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self._outcomes: dict[int, Outcome] = {}
        self._begun: set[int] = set()
        self._failures = FailureLog()

    def start(self) -> None:
        with starting_threads(self._threads):
            for index in range(len(self._specs)):
                self._executor.submit(self._work, index)
        self._executor.shutdown(wait=False)

    def collect(self, on_done: OnDone | None, stop: threading.Event | None) -> None:
        while len(self._outcomes) < len(self._specs):
            if stop is not None and stop.is_set():
                self.cancel()
                return
            try:
                index, outcome = self._ended.get(timeout=None if stop is None else _POLL)
            except queue.Empty:
                continue
            self._outcomes[index] = outcome
            if on_done is not None:
                on_done(index, outcome)

    def cancel(self) -> None:
        """Cancels all episodes and waits up to GRACE seconds for them to end."""
        self._cancellation.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + GRACE
        while left := self._begun - self._outcomes.keys():
            try:
                index, outcome = self._ended.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                _log.warning(
                    "%d cancelled episodes are still waiting for their environment", len(left)
                )
                return
            self._outcomes[index] = outcome

    def outcomes(self) -> list[Outcome]:
        self._failures.report()
        return [
            self._outcomes.get(index) or FailedEpisode(spec, "cancelled", "the run was cancelled")
            for index, spec in enumerate(self._specs)
        ]

    def _work(self, index: int) -> None:
        self._begun.add(index)
        outcome = play_safely(
            self._specs[index],
            self._agent,
            self._pool,
            self._settings,
            self._cancellation,
            self._failures,
        )
        self._ended.put((index, outcome))


class FailureLog:
    """Logs the first failure of each kind and counts the others; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, ...]] = Counter()

    def is_new(self, failed: FailedEpisode, *reason: str) -> bool:
        """Whether no episode has failed like this before; the others are only counted."""
        if failed.kind == "cancelled":
            return False
        with self._lock:
            key = (str(failed.spec.task.env), failed.kind, *reason)
            self._counts[key] += 1
            return self._counts[key] == 1

    def report(self) -> None:
        """Logs how many failures were only counted, and starts anew."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        for (env, kind, *_), count in counts.items():
            if count > 1:
                _log.warning("%d more episodes of %s are dropped (%s)", count - 1, env, kind)


def play_safely(
    spec: EpisodeSpec,
    agent: Agent,
    pool: EnvironmentPool,
    settings: RolloutSettings,
    cancellation: Cancellation,
    failures: FailureLog,
) -> Outcome:
    """Plays an episode and counts it in the run's status; an exception makes it a FailedEpisode."""
    STATUS.count(episodes_in_flight=1)
    outcome: Outcome
    try:
        outcome = play_episode(spec, agent, pool, settings, cancellation)
        if isinstance(outcome, FailedEpisode) and failures.is_new(outcome):
            _log.warning("episode %s is dropped (%s): %s", spec.uid, outcome.kind, outcome.error)
    except BaseException as error:  # including SystemExit: the caller waits for an outcome
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} (in {where.name})"
        outcome = FailedEpisode(spec, "error", message)
        if failures.is_new(outcome, type(error).__name__, where.name):
            _log.exception("episode %s failed", spec.uid)
    failed = isinstance(outcome, FailedEpisode)
    STATUS.count(
        episodes_in_flight=-1,
        episodes_finished=int(not failed),
        episodes_failed=int(failed),
        tokens=0 if isinstance(outcome, FailedEpisode) else outcome.agent_tokens,
    )
    return outcome


@contextlib.contextmanager
def starting_threads(count: int) -> Iterator[None]:
    """In this block, executors start threads with small stacks, `count` at most."""
    before = threading.stack_size(STACK_BYTES)  # a global setting of new threads
    try:
        yield
    except RuntimeError as error:
        raise ThreadLimit(
            f"{count} threads cannot be started ({error}); lower rollout.max_in_flight"
        ) from error
    finally:
        threading.stack_size(before)

"""Runs many episodes concurrently and returns their outcomes in order.

Each spec in flight has its own thread, which mostly waits for I/O; `rollout.strategy` plays its
episode, or several, in that thread. The pool's leases limit concurrency, and `run_slots` lets one
of the threads run at a time. An exception in an episode is logged and turns that episode into a
FailedEpisode, without affecting the others.
"""

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.table import environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.cancellation import Cancellation
from manus_jax.errors import UserError
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.player import Agent
from manus_jax.rollout.strategies import RolloutContext, check_strategy, play_spec
from manus_jax.rollout.trajectory import EpisodeSpec, FailedEpisode, Outcome, trajectories
from manus_jax.run_slots import SLOTS, make_room
from manus_jax.status import STATUS
from manus_jax.timeline import TIMELINE

_log = logging.getLogger(__name__)

STACK_BYTES = 1 << 20
"""Stack size of an episode thread; thousands of 8 MiB stacks exceed address-space limits."""

GRACE = 10.0
"""Seconds to wait for cancelled episodes to release their environments; slower ones end with their
own timeouts."""

_POLL = 0.1

OnDone = Callable[[int, Outcome], None]
"""Called with a spec's index and an outcome, in the caller's thread, when its episode ends."""


class ThreadLimit(UserError, RuntimeError):
    """The system does not start as many threads as episodes are to be played at once."""


def run_episodes(
    specs: Sequence[EpisodeSpec],
    agent: Agent,
    pool: EnvironmentPool,
    settings: RolloutSettings,
    on_done: OnDone | None = None,
    stop: threading.Event | None = None,
    caller_raises: bool = False,
) -> list[Outcome]:
    """Plays all episodes and returns their outcomes in the order of `specs`.

    A strategy may make several episodes of a spec; they follow each other.

    When `stop` is set, episodes in flight are cancelled, their environments are released, and
    unfinished episodes become FailedEpisode "cancelled". Ctrl-C and exceptions in `on_done` also
    cancel the episodes and are then re-raised. `caller_raises`: if no episode can be played, the
    caller raises an error that says why, so it is not logged as well. Raises ValueError for specs
    that cannot be played, before any episode starts.
    """
    check_specs(specs, agent, pool, settings)
    run = _Run(specs, agent, pool, settings)
    try:
        run.start()
        run.collect(on_done, stop)
    except BaseException:
        run.cancel()
        raise
    return run.outcomes(caller_raises)


def check_specs(
    specs: Sequence[EpisodeSpec], agent: Agent, pool: EnvironmentPool, settings: RolloutSettings
) -> None:
    """Raises ValueError unless every spec names an item that the agent can play in an open pool."""
    if len({spec.uid for spec in specs}) < len(specs):
        raise ValueError("two episodes have the same uid; they would draw the same random numbers")
    check_strategy(settings)
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
        self._ended: queue.SimpleQueue[tuple[int, list[Outcome]]] = queue.SimpleQueue()
        self._outcomes: dict[int, list[Outcome]] = {}
        self._begun: set[int] = set()
        self._failures = FailureLog()

    def start(self) -> None:
        def submit() -> None:
            for index in range(len(self._specs)):
                self._executor.submit(self._work, index)

        start_threads(self._threads, submit)
        self._executor.shutdown(wait=False)

    def collect(self, on_done: OnDone | None, stop: threading.Event | None) -> None:
        while len(self._outcomes) < len(self._specs):
            if stop is not None and stop.is_set():
                self.cancel()
                return
            try:
                index, outcomes = self._ended.get(timeout=None if stop is None else _POLL)
            except queue.Empty:
                continue
            self._outcomes[index] = outcomes
            if on_done is not None:
                for outcome in outcomes:
                    on_done(index, outcome)

    def cancel(self) -> None:
        """Cancels all episodes and waits up to GRACE seconds for them to end."""
        self._cancellation.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + GRACE
        while left := self._begun - self._outcomes.keys():
            try:
                index, outcomes = self._ended.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                _log.warning(
                    "%d cancelled episodes are still waiting for their environment", len(left)
                )
                return
            self._outcomes[index] = outcomes

    def outcomes(self, caller_raises: bool) -> list[Outcome]:
        outcomes = [
            outcome
            for index, spec in enumerate(self._specs)
            for outcome in self._outcomes.get(index)
            or [FailedEpisode(spec, "cancelled", "the run was cancelled")]
        ]
        if trajectories(outcomes) or not caller_raises:
            self._failures.report()
        return outcomes

    def _work(self, index: int) -> None:
        self._begun.add(index)
        outcomes = play_safely(
            self._specs[index],
            self._agent,
            self._pool,
            self._settings,
            self._cancellation,
            self._failures,
        )
        self._ended.put((index, outcomes))


class FailureLog:
    """Counts failed episodes, and logs those of the same kind as one line; thread-safe.

    The status of the run has the first of each kind at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: dict[tuple[str, ...], list[FailedEpisode]] = {}

    def add(self, failed: FailedEpisode, *reason: str) -> bool:
        """Returns whether no episode has failed like this since the last report."""
        if failed.kind == "cancelled":
            return False
        with self._lock:
            same = self._failed.setdefault((str(failed.spec.task.env), failed.kind, *reason), [])
            same.append(failed)
            first = len(same) == 1
        if first:
            STATUS.note_error(f"{failed.spec.uid} ({failed.kind}): {failed.error}")
        return first

    def report(self) -> None:
        """Logs the failures since the last report."""
        with self._lock:
            failed, self._failed = self._failed, {}
        for (env, kind, *_), episodes in failed.items():
            count = f"{len(episodes)} episode{'s' * (len(episodes) > 1)}"
            _log.warning("%s of %s dropped (%s): %s", count, env, kind, episodes[0].error)


def play_safely(
    spec: EpisodeSpec,
    agent: Agent,
    pool: EnvironmentPool,
    settings: RolloutSettings,
    cancellation: Cancellation,
    failures: FailureLog,
) -> list[Outcome]:
    """Plays a spec and counts its episodes in the run's status; an exception makes it a
    FailedEpisode."""
    STATUS.count(episodes_in_flight=1)
    began = time.monotonic()
    try:
        with SLOTS.member():
            outcomes = play_spec(spec, RolloutContext(agent, pool, settings, cancellation))
        for outcome in outcomes:
            if isinstance(outcome, FailedEpisode):
                failures.add(outcome)
    except BaseException as error:  # including SystemExit: the caller waits for an outcome
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} (in {where.name})"
        failed = FailedEpisode(spec, "error", message)
        outcomes = [failed]
        if failures.add(failed, type(error).__name__, where.name):
            _log.exception("episode %s failed", spec.uid)
    for outcome in outcomes:
        _add_to_timeline(outcome, began)
    played = trajectories(outcomes)
    STATUS.count(
        episodes_in_flight=-1,
        episodes_finished=len(played),
        episodes_failed=len(outcomes) - len(played),
        tokens=sum(trajectory.agent_tokens for trajectory in played),
    )
    return outcomes


def _add_to_timeline(outcome: Outcome, began: float) -> None:
    if isinstance(outcome, FailedEpisode):
        TIMELINE.add("environments", f"{outcome.spec.uid}: {outcome.kind}", began)
        return
    TIMELINE.add(
        "environments",
        outcome.uid,
        began,
        turns=len(outcome.turns),
        engine_s=round(sum(turn.generation_seconds for turn in outcome.turns), 3),
        environment_s=round(sum(turn.environment_seconds for turn in outcome.turns), 3),
    )


def start_threads(count: int, submit: Callable[[], None]) -> None:
    """Calls `submit`, in which executors start threads with small stacks, `count` at most.

    It runs in a daemon thread, unless the caller is in one, so that the threads are daemons too: up
    to Python 3.12, every start of another thread searches a set of all of these. Executors wait for
    their threads at the end of the program in any case.
    """
    make_room(count)
    submitted: Future[None] = Future()

    def run() -> None:
        try:
            submit()
            submitted.set_result(None)
        except BaseException as error:  # raised below
            submitted.set_exception(error)

    before = threading.stack_size(STACK_BYTES)  # a global setting of new threads
    try:
        if threading.current_thread().daemon:
            run()
        else:
            threading.Thread(target=run, name="start episodes", daemon=True).start()
        submitted.result()
    except RuntimeError as error:
        raise ThreadLimit(
            f"{count} threads cannot be started ({error}); lower rollout.max_in_flight"
        ) from error
    finally:
        threading.stack_size(before)

"""After infrastructure failures an episode is repeated or dropped, never scored as zero."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from scripted_engine import ScriptedEngine, oracle, says, spec_of

from manus_jax.agentgym.environments import embedded_server, open_environments
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.server_settings import EnvPoolSettings
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.cancellation import Cancellation, EpisodeCancellation, Overdue
from manus_jax.engines.protocol import EngineError, Generation, Request
from manus_jax.rollout.episode import play_episode
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.trajectory import FailedEpisode, Trajectory
from manus_jax.servers.health import BackOff
from manus_jax.servers.processes import ServerSupervisor, SupervisorSettings

EngineOf = Callable[..., ScriptedEngine]
SOON = BackOff(first=0.05)


def settings(**changes: object) -> RolloutSettings:
    return RolloutSettings(prompt_layout="acknowledged", max_total_tokens=8192, **changes)


@contextlib.contextmanager
def own_server(attempts: int) -> Iterator[tuple[EnvironmentPool, ServerSupervisor]]:
    """A maze server that a test may hurt, watched and restarted as in training."""
    supervisor = ServerSupervisor([embedded_server("maze")], SupervisorSettings(back_off=SOON))
    pool = EnvironmentPool(
        {"maze": ()},
        EnvPoolSettings(
            connect_timeout=2.0, read_timeout=1.0, attempts=attempts, first_retry=SOON.first
        ),
    )
    supervisor.on_serving, supervisor.on_given_up = pool.put_server, pool.drop_server
    try:
        supervisor.start()
        with pool:
            yield pool, supervisor
    finally:
        supervisor.stop()


def failing_once(fault: Callable[[], None]) -> Callable[[Request, str], str]:
    """The oracle, but before the second turn of the first attempt there is a fault."""
    perfect = oracle()
    turns = 0

    def script(request: Request, observation: str) -> str:
        nonlocal turns
        turns += 1
        if turns == 2:
            fault()
        return perfect(request, observation)

    return script


@pytest.mark.slow
@pytest.mark.bug("B28")
def test_an_environment_that_dies_in_mid_episode_is_played_again_on_a_fresh_one(
    engine_of: EngineOf,
) -> None:
    with own_server(attempts=4) as (pool, supervisor):
        engine = engine_of(failing_once(lambda: os.kill(supervisor.pids()[0], signal.SIGKILL)))
        agent = EngineAgent(engine, engine.tokenizer)
        trajectory = play_episode(spec_of("maze_7"), agent, pool, settings())
    assert isinstance(trajectory, Trajectory)
    assert trajectory.success
    assert trajectory.attempts > 1
    # Nothing of the attempt that died is in the trajectory, and both drew the same numbers.
    [segment] = trajectory.segments
    turns = len(trajectory.turns)
    sampled = [token for made in engine.generations[-turns:] for token in made.token_ids]
    assert segment.token_ids[segment.loss_mask].tolist() == sampled
    seeds = [request.seed for request in engine.requests]
    assert seeds[:2] == seeds[-turns:][:2]
    assert engine.open_sessions == set()


@pytest.mark.slow
def test_an_environment_that_hangs_in_mid_episode_is_given_up_in_time(
    engine_of: EngineOf,
) -> None:
    with own_server(attempts=4) as (pool, supervisor):
        pid = supervisor.pids()[0]

        def wake() -> None:
            while not pool.counters().get("maze/failures/timeout"):
                awake.wait(0.05)
            os.kill(pid, signal.SIGCONT)

        awake = threading.Event()
        waker = threading.Thread(target=wake)
        waker.start()
        engine = engine_of(failing_once(lambda: os.kill(pid, signal.SIGSTOP)))
        agent = EngineAgent(engine, engine.tokenizer)
        trajectory = play_episode(spec_of("maze_7"), agent, pool, settings())
        waker.join()
    assert trajectory.success
    assert trajectory.attempts > 1


@pytest.mark.bug("B28")
def test_an_environment_that_keeps_dying_fails_the_episode_and_gives_no_reward(
    engine_of: EngineOf,
) -> None:
    with own_server(attempts=1) as (pool, supervisor):
        engine = engine_of(failing_once(lambda: os.kill(supervisor.pids()[0], signal.SIGKILL)))
        agent = EngineAgent(engine, engine.tokenizer)
        failed = play_episode(spec_of("maze_7"), agent, pool, settings())
    assert isinstance(failed, FailedEpisode)
    # The death is noticed by the step, or by the connection that watches the server.
    assert failed.kind in ("connection", "restarted") and failed.attempts == 1
    assert "maze at http://127.0.0.1" in failed.error
    assert not hasattr(failed, "env_reward")


def test_an_item_that_does_not_exist_is_not_tried_again(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(oracle())
    agent = EngineAgent(engine, engine.tokenizer)
    failed = play_episode(spec_of("maze_100000"), agent, pool, settings())
    assert (failed.kind, failed.attempts) == ("item", 1)


class Faulty:
    """An engine whose first `times` answers are wrong in some way."""

    version = 0

    def __init__(self, engine: ScriptedEngine, times: int, fault: Callable[[Request], Future]):
        self._engine, self._times, self._fault = engine, times, fault
        self.max_length = engine.max_length
        self.released: list[str] = []

    def submit(self, request: Request) -> "Future[Generation]":
        self._times -= 1
        return self._fault(request) if self._times >= 0 else self._engine.submit(request)

    def release(self, session: str) -> None:
        self.released.append(session)


def raises(request: Request) -> Future:
    raise EngineError("the queue is full")


def answered(result: Generation | Exception) -> Future:
    future: Future = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


def withdrawn(request: Request) -> Future:
    future: Future = Future()
    future.cancel()
    return future


FAULTS = {
    "the queue is full": raises,
    "a server died": lambda request: answered(EngineError("a server died")),
    "cancelled the request": withdrawn,
    "cancelled the generation": lambda request: answered(
        Generation((1,), (0.0,), (0,), "cancelled")
    ),
    "gave 0 tokens": lambda request: answered(Generation((), (), (), "stop")),
    "gave 300 tokens, asked for 1..256": lambda request: answered(
        Generation((1,) * 300, (0.0,) * 300, (0,) * 300, "length")
    ),
    "gave 2 tokens, 1 log-probs and 2 versions": lambda request: answered(
        Generation((1, 2), (0.0,), (0, 0), "stop")
    ),
    "a log-prob that is not finite": lambda request: answered(
        Generation((1,), (float("nan"),), (0,), "stop")
    ),
    "did not respond within 0.2 s": lambda request: Future(),
}


@pytest.mark.parametrize("what", FAULTS)
def test_an_engine_that_fails_once_costs_an_attempt_and_no_more(
    what: str, engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = Faulty(engine_of(oracle()), 1, FAULTS[what])
    agent = EngineAgent(engine, engine._engine.tokenizer)
    slowly = settings(generation_timeout=0.2 if "0.2" in what else 60.0)
    trajectory = play_episode(spec_of("maze_3"), agent, pool, slowly)
    assert (trajectory.success, trajectory.attempts) == (True, 2)
    assert engine.released == ["maze_3#0/1/0", "maze_3#0/2/0"]


@pytest.mark.parametrize("what", FAULTS)
def test_an_engine_that_keeps_failing_fails_the_episode(
    what: str, engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = Faulty(engine_of(oracle()), 99, FAULTS[what])
    agent = EngineAgent(engine, engine._engine.tokenizer)
    slowly = settings(generation_timeout=0.2 if "0.2" in what else 60.0)
    failed = play_episode(spec_of("maze_3"), agent, pool, slowly)
    assert isinstance(failed, FailedEpisode)
    assert (failed.kind, failed.attempts) == ("engine", 2)
    assert what in failed.error


def test_a_generation_that_comes_too_late_is_cancelled(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    futures: list[Future] = []

    def never(request: Request) -> Future:
        futures.append(Future())
        return futures[-1]

    engine = Faulty(engine_of(says("")), 99, never)
    agent = EngineAgent(engine, engine._engine.tokenizer)
    play_episode(spec_of("maze_3"), agent, pool, settings(generation_timeout=0.05))
    assert [future.cancelled() for future in futures] == [True, True]


def test_an_episode_past_its_time_limit_is_dropped(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(oracle())
    agent = EngineAgent(engine, engine.tokenizer)
    failed = play_episode(spec_of("maze_3"), agent, pool, settings(episode_timeout=1e-6))
    assert isinstance(failed, FailedEpisode)
    assert (failed.kind, failed.attempts) == ("overdue", 1)
    assert "rollout.episode_timeout" in failed.error


def test_the_generation_of_an_overdue_episode_is_cancelled() -> None:
    never: Future[Generation] = Future()
    cancellation = EpisodeCancellation(Cancellation(), 0.02)
    cancellation.begin()
    with pytest.raises(Overdue, match=r"not finished after 0\.02 s"):
        cancellation.result(never, timeout=60.0)
    assert never.cancelled()


@pytest.mark.slow
def test_the_time_limit_of_an_episode_starts_when_it_has_an_environment(
    engine_of: EngineOf,
) -> None:
    one = EnvPoolSettings(sessions_per_server=1)
    limit = settings(episode_timeout=2.0)
    with (
        open_environments({"maze": "embedded"}, settings=one) as pool,
        ThreadPoolExecutor(1) as thread,
    ):
        engine = engine_of(oracle())
        agent = EngineAgent(engine, engine.tokenizer)
        with pool.lease("maze"):
            waiting = thread.submit(play_episode, spec_of("maze_3"), agent, pool, limit)
            with pytest.raises(TimeoutError):
                waiting.result(2.2)
        played = waiting.result(30)
    assert isinstance(played, Trajectory) and played.success

"""Many concurrent episodes: in order, independent, bounded, and cancelled promptly."""

import copy
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from scripted_engine import ScriptedEngine, oracle, says, spec_of

from manus_jax.agentgym.environments import open_environments
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.server_settings import EnvPoolSettings
from manus_jax.config.settings import RolloutSettings
from manus_jax.data.chat import ChatTemplateError
from manus_jax.data.tasks import Task
from manus_jax.engines.protocol import Generation, Request
from manus_jax.rollout import runner
from manus_jax.rollout.baseline_players import OraclePolicy, RandomPolicy
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.trajectory import EpisodeSpec, FailedEpisode, Outcome, Trajectory

EngineOf = Callable[..., ScriptedEngine]
SETTINGS = RolloutSettings(prompt_layout="acknowledged", max_total_tokens=8192, max_turns=60)


@pytest.fixture(scope="module")
def narrow_pool() -> Iterator[EnvironmentPool]:
    """Room for two episodes at a time; a third waits, but not for long."""
    settings = EnvPoolSettings(sessions_per_server=2, patience=20.0)
    with open_environments({"textcraft": "embedded"}, settings=settings) as opened:
        yield opened


def agent_of(engine: ScriptedEngine) -> EngineAgent:
    return EngineAgent(engine, engine.tokenizer)


def test_outcomes_come_in_order_and_on_done_as_they_end(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    items = ("maze_7", "textcraft_3", "wordle_5", "maze_3", "textcraft_7", "maze_3")
    specs = [spec_of(item, member) for member, item in enumerate(items)]
    heard: dict[int, Outcome] = {}
    outcomes = run_episodes(specs, agent_of(engine_of(oracle())), pool, SETTINGS, heard.__setitem__)
    assert [outcome.spec for outcome in outcomes] == specs
    assert all(outcome.success for outcome in outcomes)
    assert heard == dict(enumerate(outcomes))


def test_threads_of_episodes_are_daemons_so_that_a_start_does_not_search_the_others(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    """Up to Python 3.12, the start of another thread goes through the set of these."""
    daemons = []

    class Watching(OraclePolicy):
        def player(self, episode):
            daemons.append(threading.current_thread().daemon)
            return super().player(episode)

    run_episodes([spec_of("maze_7", n) for n in range(3)], Watching(), pool, SETTINGS)
    assert daemons == [True] * 3


def test_threads_that_cannot_be_started_are_one_line(
    engine_of: EngineOf, pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("episode"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(runner.ThreadLimit, match=r"3 threads.*lower rollout\.max_in_flight"):
        specs = [spec_of("maze_7", n) for n in range(3)]
        run_episodes(specs, agent_of(engine_of(oracle())), pool, SETTINGS)


def test_nothing_to_play_is_nothing(engine_of: EngineOf, pool: EnvironmentPool) -> None:
    assert run_episodes([], agent_of(engine_of(oracle())), pool, SETTINGS) == []


def test_a_repeated_failure_is_reported_once_with_a_count(
    engine_of: EngineOf, pool: EnvironmentPool, caplog: pytest.LogCaptureFixture
) -> None:
    def script(request: Request, observation: str) -> str:
        raise ZeroDivisionError("a bug")

    no_room = dataclasses.replace(SETTINGS, max_total_tokens=32)
    maze = [spec_of("maze_7", member) for member in range(5)]
    textcraft = [spec_of("textcraft_3", member) for member in range(3)]
    outcomes = run_episodes([*maze, *textcraft], agent_of(engine_of(oracle())), pool, no_room)
    assert {outcome.kind for outcome in outcomes} == {"prompt_too_long"}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and all("leaves no room for a turn" in line for line in lines)
    assert lines[0].startswith("5 episodes of maze dropped (prompt_too_long): ")
    assert lines[1].startswith("3 episodes of textcraft dropped (prompt_too_long): ")
    caplog.clear()
    run_episodes(maze, agent_of(engine_of(script)), pool, SETTINGS)
    assert caplog.text.count("Traceback") == 1
    assert "5 episodes of maze dropped (error): ZeroDivisionError: a bug" in caplog.text
    caplog.clear()
    run_episodes(maze, agent_of(engine_of(oracle())), pool, no_room, caller_raises=True)
    assert not caplog.records


@pytest.mark.bug("B25")
def test_the_engine_gets_the_requests_of_all_episodes_at_once(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    together = threading.Barrier(6)

    def script(request: Request, observation: str) -> str:
        together.wait(timeout=60)  # nobody goes on before all are here
        return "Action: move up"

    engine = engine_of(script)
    specs = [spec_of(f"maze_{item}") for item in range(6)]
    one_turn = dataclasses.replace(SETTINGS, max_turns=1)
    outcomes = run_episodes(specs, agent_of(engine), pool, one_turn)
    assert all(isinstance(outcome, Trajectory) for outcome in outcomes)
    assert engine.most_at_once == 6


@pytest.mark.bug("B27")
def test_samples_of_an_episode_do_not_depend_on_other_episodes(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    specs = [spec_of(f"maze_{item}") for item in range(6)]
    together = run_episodes(specs, agent_of(engine_of(oracle())), pool, SETTINGS)
    for spec, outcome in zip(specs, together, strict=True):
        [alone] = run_episodes([spec], agent_of(engine_of(oracle())), pool, SETTINGS)
        [ours], [theirs] = outcome.segments, alone.segments
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert outcome.env_reward == alone.env_reward


def test_one_bad_episode_disturbs_no_other(engine_of: EngineOf, pool: EnvironmentPool) -> None:
    perfect = oracle()

    def script(request: Request, observation: str) -> str:
        if "maze_4" in request.session:
            raise ZeroDivisionError("a bug")
        return perfect(request, observation)

    specs = [spec_of(f"maze_{item}") for item in (3, 4, 100_000, 5)]
    good, bug, missing, fine = run_episodes(specs, agent_of(engine_of(script)), pool, SETTINGS)
    assert good.success and fine.success
    assert isinstance(bug, FailedEpisode) and isinstance(missing, FailedEpisode)
    assert bug.kind == "error"
    assert bug.error.startswith("ZeroDivisionError: a bug (in ")
    assert missing.kind == "item"


@pytest.mark.bug("B26")
def test_two_episodes_never_share_a_session_and_none_is_left_behind(
    pool: EnvironmentPool,
) -> None:
    specs = [spec_of(f"textcraft_{item}", member) for item in range(8) for member in range(4)]
    before = pool.counters().get("textcraft/leases", 0)
    outcomes = run_episodes(specs, OraclePolicy(), pool, SETTINGS)
    assert [outcome.success for outcome in outcomes] == [True] * 32
    assert pool.counters()["textcraft/leases"] - before == 32
    assert "textcraft/failures/duplicate_id" not in pool.counters()
    assert "textcraft/failures/close" not in pool.counters()


def test_the_pools_size_is_the_back_pressure(
    engine_of: EngineOf, narrow_pool: EnvironmentPool
) -> None:
    engine = engine_of(oracle())
    specs = [spec_of(f"textcraft_{item}") for item in range(10)]
    outcomes = run_episodes(specs, agent_of(engine), narrow_pool, SETTINGS)
    assert all(outcome.success for outcome in outcomes)
    assert engine.most_at_once <= 2


def test_episodes_in_flight_are_bounded(engine_of: EngineOf, pool: EnvironmentPool) -> None:
    engine = engine_of(oracle())
    specs = [spec_of(f"maze_{item}") for item in range(8)]
    few = dataclasses.replace(SETTINGS, max_in_flight=3)
    assert all(isinstance(o, Trajectory) for o in run_episodes(specs, agent_of(engine), pool, few))
    assert engine.most_at_once <= 3


def test_hundreds_of_episodes_fly_at_once(pool: EnvironmentPool) -> None:
    specs = [spec_of(f"maze_{item}", member) for item in range(50) for member in range(6)]
    size = threading.stack_size()
    outcomes = run_episodes(specs, RandomPolicy(), pool, RolloutSettings(max_turns=2))
    assert [outcome.uid for outcome in outcomes] == [spec.uid for spec in specs]
    assert threading.stack_size() == size


class Silent:
    """An engine that never answers; it notes what was cancelled."""

    version, max_length = 0, 8192

    def __init__(self, expected: int, then: Callable[[], None]) -> None:
        self.futures: list[Future] = []
        self._expected, self._then = expected, then
        self._lock = threading.Lock()

    def submit(self, request: Request) -> "Future[Generation]":
        with self._lock:
            self.futures.append(Future())
            if len(self.futures) == self._expected:
                self._then()
            return self.futures[-1]

    def release(self, session: str) -> None:
        pass


def is_free(pool: EnvironmentPool) -> bool:
    """Both places of the narrow pool can be had again."""
    with pool.lease("textcraft") as one, pool.lease("textcraft") as other:
        return one.id != other.id


def test_a_stop_cancels_running_and_waiting_episodes_and_releases_their_resources(
    chat_tokenizer, narrow_pool: EnvironmentPool
) -> None:
    stop = threading.Event()
    engine = Silent(2, stop.set)
    specs = [spec_of(f"textcraft_{item}") for item in range(6)]
    agent = EngineAgent(engine, chat_tokenizer)
    outcomes = run_episodes(specs, agent, narrow_pool, SETTINGS, stop=stop)
    assert [outcome.spec for outcome in outcomes] == specs
    assert {outcome.kind for outcome in outcomes} == {"cancelled"}
    assert all(future.cancelled() for future in engine.futures)
    assert is_free(narrow_pool)


def test_episodes_that_ended_before_a_stop_are_kept(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    stop = threading.Event()
    perfect = oracle()

    def script(request: Request, observation: str) -> str:
        if "maze_3" not in request.session:
            stop.wait()
        return perfect(request, observation)

    specs = [spec_of("maze_5"), spec_of("maze_3"), spec_of("maze_4")]
    outcomes = run_episodes(
        specs, agent_of(engine_of(script)), pool, SETTINGS, lambda *_: stop.set(), stop
    )
    assert outcomes[1].success
    assert [o.kind for o in (outcomes[0], outcomes[2])] == ["cancelled", "cancelled"]


def test_a_stop_that_came_before_plays_nothing(engine_of: EngineOf, pool: EnvironmentPool) -> None:
    stop = threading.Event()
    stop.set()
    engine = engine_of(oracle())
    [outcome] = run_episodes([spec_of("maze_3")], agent_of(engine), pool, SETTINGS, stop=stop)
    assert outcome.kind == "cancelled"


def test_ctrl_c_ends_promptly_and_gives_everything_back(
    chat_tokenizer, narrow_pool: EnvironmentPool
) -> None:
    engine = Silent(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    specs = [spec_of(f"textcraft_{item}") for item in range(6)]
    with pytest.raises(KeyboardInterrupt):
        run_episodes(specs, EngineAgent(engine, chat_tokenizer), narrow_pool, SETTINGS)
    assert all(future.cancelled() for future in engine.futures)
    assert is_free(narrow_pool)


def test_an_error_of_on_done_ends_the_run_and_is_raised(
    engine_of: EngineOf, narrow_pool: EnvironmentPool
) -> None:
    def refuse(index: int, outcome: Outcome) -> None:
        raise OSError("disk full")

    specs = [spec_of(f"textcraft_{item}") for item in range(6)]
    with pytest.raises(OSError, match="disk full"):
        run_episodes(specs, agent_of(engine_of(oracle())), narrow_pool, SETTINGS, refuse)
    assert is_free(narrow_pool)


def test_episodes_that_do_not_end_are_left_behind_after_a_grace(
    chat_tokenizer, narrow_pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GRACE", 0.05)
    stop, release = threading.Event(), threading.Event()

    class Stuck(RandomPolicy):
        def player(self, context):
            stop.set()
            release.wait()
            return super().player(context)

    try:
        outcomes = run_episodes([spec_of("textcraft_1")], Stuck(), narrow_pool, SETTINGS, stop=stop)
        assert [outcome.kind for outcome in outcomes] == ["cancelled"]
    finally:
        release.set()
    assert is_free(narrow_pool)


def test_a_template_that_refuses_the_layout_is_refused_before_anything_is_played(
    engine_of: EngineOf, pool: EnvironmentPool, chat_tokenizer
) -> None:
    strict = copy.deepcopy(chat_tokenizer)
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + chat_tokenizer.chat_template
    )
    engine = engine_of(says(""))
    system = RolloutSettings(prompt_layout="system")
    with pytest.raises(
        ChatTemplateError, match=r"rejects roles \['system', 'user', 'assist.*: no system"
    ):
        run_episodes([spec_of("maze_3")], EngineAgent(engine, strict), pool, system)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("specs", "changes", "what"),
    [
        ([spec_of("maze_3"), spec_of("maze_3")], {}, "two episodes have the same uid"),
        ([spec_of("babyai_3")], {}, "'babyai' is not open; open are: maze, textcraft, wordle"),
        ([spec_of("chess_3")], {}, "unknown environment 'chess'"),
        ([EpisodeSpec(Task(None, None, "row 4"), "u", "g")], {}, "u: task 'row 4' names no env"),
        ([spec_of("maze_3")], {"action_format": "xml"}, "unknown action format 'xml'"),
        ([spec_of("maze_3")], {"action_format": "react_tool"}, "does not fit maze"),
    ],
)
def test_unplayable_specs_are_refused_before_any_episode_starts(
    specs, changes, what, engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(says(""))
    with pytest.raises(ValueError, match=what):
        run_episodes(specs, agent_of(engine), pool, RolloutSettings(**changes))
    assert engine.requests == []

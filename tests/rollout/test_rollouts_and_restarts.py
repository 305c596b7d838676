"""A server that restarts while episodes are generating costs attempts, and never a wrong score."""

import contextlib
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from maze_programs import complete
from scripted_engine import ScriptedEngine, small_tokenizer, spec_of
from scripted_servers import RestartableServer, serving

from manus_jax.agentgym.client import Session
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.table import ENVIRONMENTS
from manus_jax.config.server_settings import EnvPoolSettings
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.protocol import Request
from manus_jax.rollout.baseline_players import TextPlayer
from manus_jax.rollout.endpoint.programs import ProgramTask
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.player import EpisodeContext
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.trajectory import Trajectory

EPISODES = 6
LAST = {
    "tool_call": "last with Action Input: {}",
    "search_tags": "<answer>last</answer>",
    "fenced": "```stop [last]```",
}


class SlowAgent:
    """Plays one action, but in the first attempt not before `restarted` is set."""

    def __init__(self) -> None:
        self.generating = threading.Semaphore(0)
        self.restarted = threading.Event()

    def check(self, env: str, settings: RolloutSettings) -> None:
        pass

    def player(self, context: EpisodeContext) -> TextPlayer:
        def reply(observations: Sequence[str]) -> str:
            self.generating.release()
            if context.attempt == 1:
                self.restarted.wait(30)
            style = ENVIRONMENTS[context.spec.task.env or ""].action
            return context.action_format.render("why", LAST.get(style, "last"))

        return TextPlayer(reply)


@pytest.mark.parametrize("row", ENVIRONMENTS.values(), ids=lambda row: row.name)
def test_every_scored_episode_was_played_on_its_own_item(row) -> None:
    agent, server = SlowAgent(), RestartableServer(row)
    count = row.sessions_per_server or EPISODES
    specs = [spec_of(f"{row.name}_{item}") for item in range(count)]
    settings = EnvPoolSettings(first_retry=0.01, attempts=3)
    with (
        serving(server, server.connections) as url,
        EnvironmentPool({row.name: [url]}, settings) as pool,
        ThreadPoolExecutor(1) as threads,
    ):
        playing = threads.submit(
            run_episodes, specs, agent, pool, RolloutSettings(max_in_flight=EPISODES)
        )
        for _ in specs:
            agent.generating.acquire(timeout=30)
        server.restart()
        for _ in specs:
            stranger = Session(row, url)
            stranger.create()
            stranger.reset(19)
        agent.restarted.set()
        outcomes = playing.result(60)
    for spec, outcome in zip(specs, outcomes, strict=True):
        assert isinstance(outcome, Trajectory)
        assert outcome.attempts == 2
        assert f"item {spec.task.item}" in outcome.first_observation
        assert [turn.observation for turn in outcome.turns] == [f"item {spec.task.item}"]
        assert outcome.env_reward == 1.0


def plays_last(task: ProgramTask) -> None:
    """A program whose only action is that of the model's first reply."""
    task.reset()
    task.step(complete(task, [{"role": "user", "content": "go on"}])["content"])


STRATEGIES = {
    "tree": ({"branch_at": "turns", "turns": [1]}, "~|\\^"),
    "program": ({"function": f"{__name__}:plays_last"}, "/1/"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_restart_within_a_strategy_costs_an_attempt_and_never_a_wrong_score(strategy) -> None:
    """The server restarts while a branch or a program waits for the model."""
    row = ENVIRONMENTS["textcraft"]
    parameters, waiting = STRATEGIES[strategy]
    server, generating, restarted = RestartableServer(row), threading.Event(), threading.Event()

    def script(request: Request, observation: str) -> str:
        branch = re.search(waiting, request.session)
        if branch and not restarted.is_set():
            generating.set()
            restarted.wait(30)
        first = strategy == "tree" and not branch and request.session not in begun
        begun.add(request.session)
        action = "first" if first else "last"
        return action if strategy == "program" else f"Thought: why\nAction:\n{action}"

    begun: set[str] = set()
    engine = ScriptedEngine(small_tokenizer(), script)
    agent = EngineAgent(engine, engine.tokenizer)
    settings = RolloutSettings(
        strategy=strategy, strategy_parameters=parameters, max_total_tokens=8192
    )
    with (
        serving(server, server.connections) as url,
        EnvironmentPool({row.name: [url]}, EnvPoolSettings(first_retry=0.01, attempts=3)) as pool,
        ThreadPoolExecutor(1) as threads,
        contextlib.closing(agent),
        contextlib.closing(engine),
    ):
        playing = threads.submit(run_episodes, [spec_of("textcraft_3")], agent, pool, settings)
        assert generating.wait(60)
        server.restart()
        stranger = Session(row, url)
        stranger.create()
        stranger.reset(19)
        restarted.set()
        outcomes = playing.result(60)
    assert len(outcomes) == (2 if strategy == "tree" else 1)
    for outcome in outcomes:
        assert isinstance(outcome, Trajectory), outcome
        assert (outcome.first_observation, outcome.env_reward) == ("item 3", 1.0)
        assert {turn.observation for turn in outcome.turns if turn.action} == {"item 3"}
    assert outcomes[-1].attempts == 2

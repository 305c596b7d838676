"""A server that restarts while episodes are generating costs attempts, and never a wrong score."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from scripted_engine import spec_of
from scripted_servers import RestartableServer, serving

from manus_jax.agentgym.client import Session
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.table import ENVIRONMENTS
from manus_jax.config.server_settings import EnvPoolSettings
from manus_jax.config.settings import RolloutSettings
from manus_jax.rollout.baseline_players import TextPlayer
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

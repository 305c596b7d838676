"""sciworld: an item plays the same way, whatever its simulator, session or server did before."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from env_servers import AppServer, Client

from envs.game import GameError
from envs.sciworld import SPEC
from envs.sciworld.game import SciWorld
from envs.sciworld.simulators import (
    MEMORY_OPTIONS,
    POOL,
    SAME_HASHES,
    gold_path,
    java_options,
    launch,
    missing,
)
from envs.sciworld.tasks import pair
from envs.server import build_app

needs_java = [
    pytest.mark.java,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
TELLING = (105, 390, 4186, 1426, 4634)
"""Items whose observations or scores change in a simulator whose objects hash at random: melting
temperatures, circuits that close a step later, cups of paint and animals in another order."""
Episode = list[tuple[str, float, int, bool]]
"""Observation, reward, score and done of the reset and of each step."""


def test_the_hashes_are_fixed_for_any_java_options() -> None:
    assert java_options("") == f"{MEMORY_OPTIONS} {SAME_HASHES}"
    assert java_options("-Xmx2g") == f"-Xmx2g {SAME_HASHES}"
    assert java_options(java_options("-Xmx2g")) == java_options("-Xmx2g")


@pytest.fixture(scope="module")
def moves() -> dict[int, list[str]]:
    """The oracle's actions, each followed by a look at the room or at what the agent holds."""
    simulator = POOL.lease()
    paths = {item: gold_path(simulator, pair(item)[0].name, pair(item)[1]) for item in TELLING}
    POOL.give_back(simulator)
    looks = itertools.cycle(("look around", "inventory"))
    return {
        item: [said for action in path for said in (action, next(looks))]
        for item, path in paths.items()
    }


def played_in_process(game: SciWorld, item: int, actions: Sequence[str]) -> Episode:
    episode: Episode = [(game.reset(item), 0, 0, False)]
    for action in actions:
        if episode[-1][3]:
            break
        step = game.step(action)
        episode.append((step.observation, step.reward, step.info["score"], step.done))
    return episode


def played_on_a_server(client: Client, session: Any, item: int, actions: Sequence[str]) -> Episode:
    fields = ("observation", "reward", "score", "done")
    answer = client.ok("/reset", {**session, "data_idx": item})
    episode: Episode = [tuple(answer[field] for field in fields)]
    for action in actions:
        if episode[-1][3]:
            break
        answer = client.ok("/step", {**session, "action": action})
        episode.append(tuple(answer[field] for field in fields))
    return episode


class TestWithJava:
    """What only a real simulator can show."""

    pytestmark = needs_java

    def test_an_item_plays_the_same_after_other_items_and_on_another_server(
        self, moves: dict[int, list[str]], served: Callable[[str], str], serve_app: AppServer
    ) -> None:
        """Three histories: one session all through; a session each on another server, in another
        order; and a simulator that somebody left in the middle of another item."""
        first = Client(served("sciworld"))
        session = first.ok("/create")
        expected = {item: played_on_a_server(first, session, item, moves[item]) for item in TELLING}
        assert all(episode[-1][2:] == (100, True) for episode in expected.values())

        second = Client(serve_app(build_app(SPEC)))
        for item in reversed(TELLING):
            session = second.ok("/create")
            assert played_on_a_server(second, session, item, moves[item]) == expected[item]
            assert second.ok("/close", session) is True

        for item in TELLING[-2:]:
            left = SciWorld()
            played_in_process(left, 2636, ["open door to hallway", "no such thing", "wait"])
            left.query(lambda simulator: simulator.get_valid_action_object_combinations())
            left.close()
            game = SciWorld()
            assert played_in_process(game, item, moves[item]) == expected[item]
            game.close()

    def test_the_oracle_takes_the_same_path_when_it_is_asked_again(self) -> None:
        task, variation = pair(4216)
        simulator = POOL.lease()
        paths = [gold_path(simulator, task.name, variation) for _ in range(2)]
        POOL.give_back(simulator)
        assert paths[0] == paths[1]

    def test_a_java_with_other_hashes_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("JAVA_TOOL_OPTIONS", f"{SAME_HASHES} -XX:hashCode=5")
        with pytest.raises(GameError, match=r"hashCode=2.*JAVA_TOOL_OPTIONS"):
            launch()

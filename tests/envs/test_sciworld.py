"""sciworld: AgentGym's items and fields on real simulators, and the pool that bounds them."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from env_servers import AppServer, Client, listening_addresses
from oracle_episodes import oracle_episode

from envs.game import GameError
from envs.sciworld import SPEC
from envs.sciworld.game import SciWorld
from envs.sciworld.simulators import SETTING, SimulatorPool, launch, limit, missing
from envs.sciworld.tasks import ITEMS, TASKS, pair
from envs.server import build_app

TRANSCRIPT = Path(__file__).parents[1] / "support" / "transcripts" / "sciworld.jsonl"
needs_java = [
    pytest.mark.java,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


class Idle:
    """Stands for a simulator where only the pool's book-keeping is under test."""

    closed = False

    def close(self) -> None:
        self.closed = True


def test_items_count_through_the_variations_as_agentgym_does() -> None:
    assert ITEMS == 4639
    assert [(pair(n)[0].name, pair(n)[1]) for n in (0, 29, 30, 120, 4638)] == [
        ("boil", 0),
        ("boil", 29),
        ("melt", 0),
        ("use-thermometer", 0),
        ("identify-life-stages-2", 9),
    ]
    for item in (-1, 4639, 10**30):
        with pytest.raises(GameError, match="does not exist"):
            pair(item)


def test_splits_are_disjoint() -> None:
    train, test = set(SPEC.items("train")), set(SPEC.items("test"))
    assert train and test and not train & test and max(train | test) < ITEMS


def test_the_pool_reuses_refuses_and_replaces() -> None:
    made: list[Idle] = []

    def make() -> Idle:
        made.append(Idle())
        return made[-1]

    pool = SimulatorPool(2, make)
    one, two = pool.lease(), pool.lease()
    assert one is not two
    with pytest.raises(GameError, match=f"All 2 simulators are in use.*{SETTING}"):
        pool.lease()
    pool.give_back(one)
    assert pool.lease() is one and len(made) == 2
    pool.discard(two)
    assert two.closed and pool.lease() is made[2]


def test_a_launch_that_fails_gives_its_place_back() -> None:
    def fail() -> Any:
        raise OSError("no java")

    pool = SimulatorPool(1, fail)
    for _ in range(3):
        with pytest.raises(OSError, match="no java"):
            pool.lease()


def test_missing_requirements_are_one_line_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    said = missing()
    assert said is not None and "\n" not in said
    assert "sciworld" in said and ("Java" in said or "pip install" in said)


def test_a_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "three")
    said = missing()
    assert said is not None and SETTING in said and "'three'" in said
    monkeypatch.setenv(SETTING, "3")
    assert limit() == 3


@pytest.fixture(scope="module")
def game() -> Iterator[SciWorld]:
    """One session for all tests that need no more: a simulator takes seconds to start."""
    session = SciWorld()
    yield session
    session.close()


@pytest.mark.usefixtures("game")
class TestWithJava:
    """What only a real simulator can show."""

    pytestmark = needs_java

    def test_the_written_counts_and_splits_are_the_simulators(self, game: SciWorld) -> None:
        game.reset(0)
        for task in TASKS[::8]:
            game.reset(next(n for n in range(ITEMS) if pair(n) == (task, 0)))
            counted = game.query(
                lambda simulator, name=task.name: (
                    simulator.get_max_variations(name),
                    list(simulator.get_variations_train()),
                    list(simulator.get_variations_test()),
                )
            )
            assert counted == (
                task.variations,
                list(range(task.train_end)),
                list(range(task.test_start, task.variations)),
            )

    def test_a_wrong_focus_ends_the_episode_with_a_negative_score(self, game: SciWorld) -> None:
        game.reset(0)
        step = game.step("focus on picture")
        assert step.done and step.info["score"] < 0 and step.reward == step.info["score"]
        with pytest.raises(GameError):
            game.step("look around")

    def test_more_than_100_moves_end_the_episode(self, game: SciWorld) -> None:
        game.reset(0)
        doors = ["open door to kitchen", "close door to kitchen"] * 51
        game.step("look around")  # looking is no move
        steps = [game.step(action) for action in doors[:101]]
        assert [step.done for step in steps] == [False] * 100 + [True]

    def test_a_step_never_asks_for_the_list_of_valid_actions(self, game: SciWorld) -> None:
        game.reset(0)
        simulator = game._simulator
        server, calls = simulator.server, []

        class Listening:
            def __getattr__(self, name: str) -> Any:
                calls.append(name)
                return getattr(server, name)

        simulator.server = Listening()
        game.step("open door to kitchen")
        simulator.server = server
        assert calls == ["step", "getScore", "getCompleted", "getNumMoves"]

    def test_the_oracle_reaches_the_full_score(self) -> None:
        for item in (1431, 4347):
            assert item in SPEC.items("test")
            last = oracle_episode(SPEC, item)[-1]
            assert last.done and last.info["score"] == 100

    def test_a_killed_simulator_is_replaced_at_the_next_reset(self) -> None:
        pool = SimulatorPool(1, launch)
        session = SciWorld(pool)
        first = session.reset(0)
        os.kill(session._simulator._gateway.java_process.pid, signal.SIGKILL)
        session._simulator._gateway.java_process.wait(timeout=30)
        with pytest.raises(GameError, match="died"):
            session.step("look around")
        assert session.reset(0) == first
        session._simulator.close()

    def test_a_simulator_is_spoken_to_over_loopback_alone(self, game: SciWorld) -> None:
        java = game._simulator._gateway.java_process.pid
        for process in (java, os.getpid()):
            assert listening_addresses(process) in ({"127.0.0.1"}, {"::ffff:127.0.0.1"})

    def test_a_visual_step_reads_the_agents_text_and_tells_all_that_a_viewer_shows(
        self, serve_app: AppServer
    ) -> None:
        client = Client(serve_app(build_app(SPEC)))
        own = client.ok("/create")

        def stepped(text: str) -> Any:
            return client.ok("/step_visual", {**own, "action": text})

        assert "error" in stepped("look around")  # nothing has been reset yet
        client.ok("/reset", {**own, "data_idx": 0})
        answer = stepped("Thought:\nIt is next door.\n\nAction:\nopen door to kitchen</s>")
        outcome = {"observation": "The door is now open.", "reward": 0, "score": 0, "done": False}
        assert {key: answer.pop(key) for key in outcome} == outcome
        assert set(answer) == {"info", "object_tree", "inventory", "moves"}
        info = answer["info"]
        assert (info["taskName"], info["variationIdx"], info["moves"]) == ("boil", 0, 1)
        assert "door to the kitchen (that is open)" in info["look"]
        assert "go to kitchen" in info["valid"] or "go kitchen" in info["valid"]
        assert answer["inventory"] == info["inv"] and answer["moves"] == info["moves"]
        assert "kitchen" in stepped("go to kitchen")["info"]["look"]
        lost = stepped("Action: focus on stove")
        assert lost["done"] and lost["score"] < 0
        error = f"The task with environment {own['id']} has finished."
        assert stepped("look around") == {"error": error}
        assert client.post("/step_visual", own)[0] == 422
        assert client.ok("/close", own) is True

    def test_the_server_answers_the_recorded_exchange(
        self, served: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(SETTING, "1")
        client = Client(served("sciworld"))
        session = -1
        for line in TRANSCRIPT.read_text(encoding="utf-8").splitlines():
            exchange = json.loads(line)
            method, path, body = (exchange["request"][key] for key in ("method", "path", "body"))
            if path == "/detail?id=0":
                continue  # compared below: its observation is the newest one
            if body is not None:
                body = {**body, "id": session}
            path = path.replace("?id=0", f"?id={session}")
            status, answer = client.get(path) if method == "GET" else client.post(path, body)
            assert status == exchange["status"]
            if path == "/create":
                session = answer["id"]
                continue
            expected = json.loads(exchange["response_text"])
            if body is not None and body.get("action") == "task":
                answer["observation"] = answer["observation"].replace("Description", "description")
            assert answer == expected, exchange
        assert set(client.get(f"/detail?id={session}")[1]) == {
            "task_name",
            "var_num",
            "task_description",
            "observation",
            "reward",
            "score",
            "done",
            "deleted",
        }
        assert "open art studio door" in client.get(f"/valid_actions?id={session}")[1]
        assert set(client.get(f"/state?id={session}")[1]) == {
            "observation",
            "inventory",
            "task_description",
            "goal_progress",
            "possible_actions",
            "possible_objects",
            "current_moves",
            "environment_info",
        }
        assert set(client.get(f"/object_tree?id={session}")[1]) == {"object_tree"}
        assert "error" in client.ok("/create")  # the only simulator is in use
        assert client.ok("/close", {"id": session}) is True
        assert "error" not in client.ok("/create")

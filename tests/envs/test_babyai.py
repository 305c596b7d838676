"""BabyAI: AgentGym's texts on minigrid's levels, episodes that end, and an oracle that wins."""

import base64
import hashlib
import json
import random
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from env_servers import Client
from fingerprints import fingerprint, fingerprint_elsewhere
from oracle_episodes import oracle_episode

from envs.babyai import SPEC
from envs.babyai.game import BabyAIGame
from envs.babyai.levels import LEVELS, UNWINNABLE, new_level
from envs.babyai.sight import look, reach
from envs.game import GameError

TRANSCRIPT = Path(__file__).parents[1] / "support" / "transcripts" / "babyai.jsonl"

# The validation items of OpenManus-RL: item, goal, digest of the first observation.
RECORDED = [
    (2698, "pick up the box", "1fd52133cf5d6c3c"),
    (360, "go to the red ball", "e4b7b5025e1d8021"),
    (75, "pick up a grey box", "97a59db16b1970c1"),
    (3995, "pick up the green ball", "67c59c7dcc79aca9"),
    (950, "pick up the key", "86ba5e2acd0b2cdd"),
    (808, "go to the blue ball", "3b2a05be374f4488"),
    (724, "go to the grey ball", "abca385ce7a9ff37"),
    (443, "go to the blue ball", "5983cc5ba1891879"),
    (3925, "go to the green box", "94d93f43c86d2433"),
    (324, "go to the green box", "5c5cdcc59330e089"),
    (3089, "go to the yellow door", "d9b228016a072429"),
    (3989, "go to a purple door", "fd464058ee013325"),
    (2047, "go to a door", "8a5e9370e7fc89a0"),
    (272, "pick up the ball", "5c6a6fb114a1870b"),
    (2310, "pick up the ball", "9f91fcb2914b6d55"),
    (1500, "pick up the yellow box", "5ad07932cc80516a"),
    (86, "go to a green key", "f8d34e1c07e6e1d7"),
    (84, "go to the purple key", "52342f1658b1dc50"),
    (286, "go to a green key", "bedf6149e03f74dc"),
    (715, "pick up the blue key on your right", "8b5a6dfc5f6d4c7e"),
]


def item_of(level: str, seed: int) -> int:
    """AgentGym numbers the levels first, then the seeds."""
    return LEVELS.index(level) + len(LEVELS) * seed


@pytest.mark.parametrize(("item", "goal", "digest"), RECORDED)
def test_first_observations_are_the_recorded_ones(item: int, goal: str, digest: str) -> None:
    text = BabyAIGame().reset(item).partition("\nAvailable actions: ")[0]
    assert text.startswith(f"Your goal: {goal}\n")
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_the_server_answers_every_recorded_exchange_as_recorded(
    served: Callable[[str], str],
) -> None:
    client = Client(served("babyai"))
    session = 0
    for line in TRANSCRIPT.read_text(encoding="utf-8").splitlines():
        exchange = json.loads(line)
        method, path, body = (exchange["request"][key] for key in ("method", "path", "body"))
        expected = json.loads(exchange["response_text"])
        if body is not None:
            body = {**body, "id": session}
        path = path.replace("?id=0", f"?id={session}")
        status, answer = client.get(path) if method == "GET" else client.post(path, body)
        assert status == exchange["status"]
        if path == "/create":
            session = answer["id"]
        elif exchange.get("note") == "step before reset":
            assert set(answer) == {"error"}
        else:
            text = json.dumps(expected).replace(f"environment {0}", f"environment {session}")
            assert answer == json.loads(text.replace("id 0 is", f"id {session} is")), exchange


def won(game: BabyAIGame, actions: list[str]) -> tuple[float, bool, str]:
    for action in actions:
        step = game.step(action)
    return step.reward, step.done, step.observation


def test_success_ends_the_episode_even_when_it_is_worth_less_than_a_half() -> None:
    # The red ball of item 0 is 8 low-level steps away; after 40 turns on the spot, of 64 steps
    # allowed, the reward is 1 - 0.9 * 48 / 64 = 0.325.
    game = BabyAIGame()
    game.reset(0)
    reward, done, text = won(game, ["turn left"] * 40 + ["go to red ball 1"])
    assert (reward, done) == (pytest.approx(0.325), True)
    assert "\n The task is completed.\n" in text
    with pytest.raises(GameError):
        game.step("turn left")


def test_running_out_of_steps_ends_the_episode_without_a_reward() -> None:
    game = BabyAIGame()
    game.reset(0)
    steps = [game.step("turn left") for _ in range(64)]
    assert [step.done for step in steps] == [False] * 63 + [True]
    assert sum(step.reward for step in steps) == 0
    assert "The step limit is reached." in steps[-1].observation


def test_invalid_actions_cost_nothing_and_earn_nothing() -> None:
    game = BabyAIGame()
    game.reset(0)
    before = game.observation().partition("Available actions")[2]
    for action in ("fly", "", "go to", "go to the moon", "pickup red ball 7", "toggle", "drop"):
        step = game.step(action)
        assert (step.reward, step.done) == (0, False)
        assert step.observation.startswith("The action is not recognized.")
        assert step.observation.partition("Available actions")[2] == before
    assert game.level.step_count == 0


def test_pick_up_may_be_written_in_two_ways_and_in_capitals() -> None:
    texts = []
    for action in ("pickup red ball 1", "pick up red ball 1", " Pick up Red Ball 1 "):
        game = BabyAIGame()
        game.reset(item_of("GoToRedBall", 0))
        texts.append(game.step(action).observation)
    assert len(set(texts)) == 1


def test_a_locked_door_needs_the_key_of_its_color() -> None:
    game = BabyAIGame()
    game.reset(item_of("UnlockLocalDist", 1))
    locked = [name for name in game.sight.things if "locked door" in name]
    for _ in range(3):
        if not locked:
            game.step("turn right")
            locked = [name for name in game.sight.things if "locked door" in name]
    step = game.step(f"toggle and go through {locked[0]}")
    assert step.observation.startswith(
        f"You cannot toggle and go through {locked[0]}, as you are not carrying a key."
    )


def test_walks_are_as_short_as_those_of_a_slow_search() -> None:
    level = new_level(item_of("GoToObjMazeS7", 3))
    headings = ((1, 0), (0, 1), (-1, 0), (0, -1))
    start = (*map(int, level.agent_pos), int(level.agent_dir))
    costs, frontier = {start: 0}, {start}
    while frontier:
        following = set()
        for x, y, d in frontier:
            ahead = (x + headings[d][0], y + headings[d][1])
            cell = level.grid.get(*ahead)
            options = {(x, y, (d + 1) % 4), (x, y, (d - 1) % 4)}
            if cell is None or cell.can_overlap():
                options.add((*ahead, d))
            for state in options - set(costs):
                costs[state] = costs[x, y, d] + 1
                following.add(state)
        frontier = following
    targets = [(x, y) for x in range(level.width) for y in range(level.height)]
    expected: dict[tuple[int, int], int] = {}
    for (x, y, d), cost in costs.items():
        at = (x + headings[d][0], y + headings[d][1])
        expected[at] = min(cost, expected.get(at, cost))
    assert {at: len(way) for at, way in reach(level, targets).items()} == expected


def test_things_are_numbered_from_the_nearest_on() -> None:
    sight = look(new_level(0))
    assert list(sight.things)[:4] == ["grey key 1", "grey ball 1", "grey key 2", "grey key 3"]
    assert [thing.cell for thing in sight.things.values()][:2] == [(1, -1), (1, 1)]


@pytest.mark.parametrize("level", [name for name in LEVELS if name not in UNWINNABLE])
def test_the_oracle_wins_every_level(level: str) -> None:
    steps = oracle_episode(SPEC, item_of(level, 900))
    assert steps[-1].done and steps[-1].reward > 0
    assert len(steps) < 100


def test_splits_are_disjoint_and_omit_unsolvable_items() -> None:
    train, test = set(SPEC.items("train")), set(SPEC.items("test"))
    assert not train & test
    assert len(train) == 39 * 900 and len(test) == 39 * 100
    assert item_of("OpenDoorsOrderN4Debug", 5) not in train | test


def test_unknown_items_and_early_steps_are_refused() -> None:
    game = BabyAIGame()
    for item in (-1, 40_000, 10**30):
        with pytest.raises(GameError, match="does not exist"):
            game.reset(item)
    for call in (lambda: game.step("turn left"), game.observation):
        with pytest.raises(GameError):
            call()


@pytest.mark.slow
def test_items_are_the_same_in_another_process() -> None:
    items = [36_000 + level for level in (0, 5, 9, 12, 18, 21, 25, 33, 38)]
    assert fingerprint("babyai", items) == fingerprint_elsewhere("babyai", items)


def test_render_answers_a_png(served: Callable[[str], str]) -> None:
    client = Client(served("babyai"))
    session = client.ok("/create")["id"]
    client.ok("/reset", {"id": session, "data_idx": 3})
    uri = client.ok("/render", {"id": session})
    head, _, data = uri.partition(",")
    png = base64.b64decode(data)
    assert head == "data:image/png;base64" and png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    length = int.from_bytes(png[33:37], "big")
    assert len(zlib.decompress(png[41 : 41 + length])) == height * (1 + 3 * width)


def test_a_megabyte_of_action_is_just_not_recognized(served: Callable[[str], str]) -> None:
    client = Client(served("babyai"))
    session = client.ok("/create")["id"]
    client.ok("/reset", {"id": session, "data_idx": 3})
    step = client.ok("/step", {"id": session, "action": "go to " + "x" * 1_000_000})
    assert step["observation"].startswith("The action is not recognized.")
    assert "error" in client.ok("/reset", {"id": session, "data_idx": 10**9})


@pytest.mark.slow
def test_256_sessions_at_once_each_see_their_own_game(served: Callable[[str], str]) -> None:
    url = served("babyai")
    moves = ["turn left", "turn right", "move forward", "check available actions"]

    def visit(thread: int) -> list[int]:
        rng = random.Random(thread)
        client = Client(url)
        pairs: list[tuple[int, BabyAIGame]] = []
        for _ in range(16):
            game, item = BabyAIGame(), rng.randrange(40_000)
            session = client.ok("/create")["id"]
            answer: Any = client.ok("/reset", {"id": session, "data_idx": item})
            assert answer["observation"] == game.reset(item)
            pairs.append((session, game))
        for _ in range(2):
            for session, game in pairs:
                action = rng.choice(moves)
                answer = client.ok("/step", {"id": session, "action": action})
                assert answer["observation"] == game.step(action).observation
        return [session for session, _ in pairs]

    with ThreadPoolExecutor(16) as pool:
        sessions = [session for part in pool.map(visit, range(16)) for session in part]
    assert len(set(sessions)) == 256
    client = Client(url)
    assert all(client.ok("/close", {"id": session}) for session in sessions)

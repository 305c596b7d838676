"""256 concurrent sessions on a real server: no errors, and no session sees the game of another."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from env_servers import Client, seen

from envs.game import Game
from envs.registry import load

SESSIONS = 256
THREADS = 16
ROUNDS = 4
DISTURBANCES = {
    "textcraft": ["inventory", "get 3 sand", "get 1 oak logs", "dance"],
    "maze": ["move up", "move down", "move left", "move right"],
    "babyai": ["turn left", "turn right", "move forward", "check available actions", "dance"],
    "wordle": ["s l a t e", "c r a n e", "b u d d y", "zzzzz"],
}


class Pair:
    """A session on the server and the same game played here."""

    def __init__(self, client: Client, session: int, game: Game, seed: int) -> None:
        self.client, self.session, self.game = client, session, game
        self.rng = random.Random(seed)

    def reset(self, field: str, item: int) -> None:
        answer = self.client.ok("/reset", {"id": self.session, field: item})
        assert answer["observation"] == self.game.reset(item)

    def step(self, action: str) -> bool:
        step = self.game.step(action)
        answer = self.client.ok("/step", {"id": self.session, "action": action})
        told = answer["observation"], answer["reward"], answer["done"]
        assert told == (step.observation, step.reward, step.done)
        return step.done


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTURBANCES)
def test_256_interleaved_sessions_each_see_their_own_game(
    served: Callable[[str], str], name: str
) -> None:
    spec = load(name)
    url = served(name)
    items = [*spec.items("train"), *spec.items("test")]

    def play_some(thread: int) -> list[int]:
        client = Client(url)
        pairs = []
        for index in range(SESSIONS // THREADS):
            session = client.ok("/create", {})["id"]
            pairs.append(Pair(client, session, spec.new_game(), seed=1000 * thread + index))
        for pair in pairs:
            pair.reset(spec.item_field, items[pair.rng.randrange(len(items))])
        live = list(pairs)
        for _ in range(ROUNDS):
            live = [pair for pair in live if not pair.step(pair.rng.choice(DISTURBANCES[name]))]
        for pair in live:
            status, answer = client.get(f"/observation?id={pair.session}")
            assert (status, seen(answer)) == (200, pair.game.observation())
        return [pair.session for pair in pairs]

    with ThreadPoolExecutor(THREADS) as pool:
        sessions = [session for part in pool.map(play_some, range(THREADS)) for session in part]
    assert len(set(sessions)) == SESSIONS
    client = Client(url)
    assert set(sessions) <= set(client.get("/list_envs")[1])
    assert all(client.ok("/close", {"id": session}) for session in sessions)
    assert not set(sessions) & set(client.get("/list_envs")[1])

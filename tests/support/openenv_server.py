"""An OpenEnv server of levers, one of which pays; for an interpreter that has openenv-core."""

import socket
from typing import Any, Literal

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Pull(Action):
    lever: Literal["one", "two", "three"]


class Seen(Observation):
    text: str = ""


class Levers(Environment[Pull, Seen, State]):
    """Pull the lever that pays."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self._state = State(step_count=0)
        return Seen(text=f"Which lever of {seed}?")

    def step(self, action: Pull, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        self._state.step_count += 1
        right = action.lever == "two"
        text = "It pays." if right else "Nothing."
        return Seen(text=text, reward=0.5 if right else 0.0, done=self._state.step_count == 2)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Levers, Pull, Seen, max_concurrent_envs=64)
    bound = socket.create_server(("127.0.0.1", 0))
    print(f"serving http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[bound])

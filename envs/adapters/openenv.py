"""`openenv:URL`: an environment behind an OpenEnv server (PyPI openenv-core).

Every session is a WebSocket connection, to which the server gives an environment of its own. The
server's schema says what an action is: the text itself, if it has one field, else a JSON object. An
item is the seed of the reset, and the reward is the sum of the rewards so far.
"""

import contextlib
import functools
import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from envs.adapters.adapted_game import AdaptedGame, require_package
from envs.game import ClientView, EnvironmentSpec, GameError, Step, fixed_splits
from envs.registry import UnknownEnvironment

TRAIN, TEST = range(10_000), range(10_000, 10_500)
CONNECT_SECONDS, STEP_SECONDS = 20.0, 300.0
MAX_BYTES = 16 << 20
_HIDDEN = ("done", "reward", "metadata")


@functools.cache
def adapted(name: str) -> EnvironmentSpec:
    """The environment at a URL; UnknownEnvironment if there is none."""
    require_package(f"openenv:{name}", "websockets.sync.client", "openenv")
    url = name.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise UnknownEnvironment(f"{url!r} is not an address: write openenv:http://HOST:PORT")
    try:
        schema, about = (_get(f"{url}/{page}") for page in ("schema", "metadata"))
        fields: Mapping[str, Any] = {
            name: field
            for name, field in schema["action"]["properties"].items()
            if name != "metadata"
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnknownEnvironment(f"openenv:{url} is not an OpenEnv server: {reason}") from error
    values = _values(fields)
    return EnvironmentSpec(
        name=f"openenv:{name}",
        health="ok",
        family="id",
        item_field="data_idx",
        new_game=lambda: OpenEnvGame(url, fields),
        items=fixed_splits(TRAIN, TEST),
        plausible_actions=(lambda observations: values) if values else None,
        client=ClientView(
            instruction=str(about.get("description") or f"You play {about.get('name')}."),
            actions=values or (_described(fields),),
        ),
    )


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as answer:
        return json.loads(answer.read(MAX_BYTES))


def _values(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """All actions, if they can be listed."""
    if len(fields) != 1:
        return ()
    [field] = fields.values()
    return tuple(map(str, field.get("enum", ())))


def _described(fields: Mapping[str, Any]) -> str:
    about = {
        name: field.get("description") or field.get("type", "value")
        for name, field in fields.items()
    }
    if len(fields) == 1:
        [text] = about.values()
        return f"the {next(iter(fields))}: {text}"
    return f"a JSON object: {json.dumps(about)}"


class OpenEnvGame(AdaptedGame):
    """One connection to the server."""

    def __init__(self, url: str, fields: Mapping[str, Any]) -> None:
        super().__init__()
        self._url = url.replace("http", "ws", 1) + "/ws"
        self._fields = fields
        self._socket: Any = None

    def reset(self, item: int) -> str:
        from websockets.sync.client import connect

        if self._socket is None:
            self._socket = connect(
                self._url, open_timeout=CONNECT_SECONDS, max_size=MAX_BYTES, proxy=None
            )
        answer = self._exchange("reset", {"seed": item})
        if answer["type"] == "error":
            raise GameError(f"The OpenEnv server refuses to reset: {_problem(answer)}")
        return self._started(_text(answer["data"].get("observation")))

    def step(self, action: str) -> Step:
        self._require_running()
        payload = self._payload(action)
        if payload is None:
            return self._refused(
                f"{action[:80]!r} is not an action; it must be {_described(self._fields)}."
            )
        answer = self._exchange("step", payload)
        if answer["type"] == "error":
            if answer["data"].get("code") != "VALIDATION_ERROR":
                raise GameError(f"The OpenEnv server failed: {_problem(answer)}")
            return self._refused(f"This is not an action: {_problem(answer)}")
        result = answer["data"]
        reward, done = float(result.get("reward") or 0), bool(result.get("done"))
        return self._stepped(_text(result.get("observation")), reward, done)

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(Exception):  # a lost connection is closed already
                self._socket.send(json.dumps({"type": "close"}))
            self._socket.close()

    def _exchange(self, kind: str, data: Mapping[str, Any]) -> Any:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        return json.loads(self._socket.recv(STEP_SECONDS))

    def _payload(self, text: str) -> Mapping[str, Any] | None:
        """The action as the server reads it; None if the text is none."""
        if len(self._fields) == 1:
            [(name, field)] = self._fields.items()
            if field.get("type") == "string":
                return {name: text}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if len(self._fields) == 1 and not isinstance(value, dict):
            return {next(iter(self._fields)): value}
        return value if isinstance(value, dict) else None


def _problem(answer: Any) -> str:
    return " ".join(str(answer["data"].get("message", answer["data"])).split())[:500]


def _text(observation: Any) -> str:
    """The fields of an observation; one text by itself."""
    if not isinstance(observation, dict):
        return str(observation)
    shown = {name: value for name, value in observation.items() if name not in _HIDDEN}
    if len(shown) == 1 and isinstance(value := next(iter(shown.values())), str):
        return value
    return "\n".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in shown.items()
    )

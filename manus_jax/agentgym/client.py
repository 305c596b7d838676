"""One session on one environment server: create, reset, step, close.

The code is the same for every environment and is driven by its row in `table.py`. A response is
either an observation of the game or an `EnvironmentFailure` that names the environment, the URL,
the call and the response. A session belongs to one thread at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlencode

from manus_jax.agentgym.connection import Connection
from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind, shortened
from manus_jax.agentgym.rewards import EpisodeReward
from manus_jax.agentgym.table import EnvironmentRow
from manus_jax.config.server_settings import EnvPoolSettings
from manus_jax.status import STATUS

_CLOSE_TIMEOUT = 10.0

Listener = Callable[[EnvironmentFailure | None], None]
"""Called with every failure of a call, and with None after every successful step."""


@dataclass(frozen=True)
class StepResult:
    """The result of one action. The rewards of an episode's steps sum to its reward."""

    observation: str
    reward: float
    done: bool
    info: Mapping[str, Any]


class Incarnation(Protocol):
    """One life of a server process (see `incarnations.py`)."""

    def ended(self) -> bool: ...


class Session:
    """One game on one server, to be played by one thread at a time.

    `create` once, then `reset` and `step` for each episode, then `close`. The session is valid as
    long as the incarnation of the server that created it, if one is given.
    """

    def __init__(
        self,
        row: EnvironmentRow,
        root: str,
        settings: EnvPoolSettings | None = None,
        listener: Listener | None = None,
        incarnation: Incarnation | None = None,
    ) -> None:
        self.row = row
        self.root = root
        self.id: int | str | None = None
        self.available_actions: tuple[str, ...] = ()
        """The actions that are possible now, where the server lists them."""
        self.listener = listener
        self._incarnation = incarnation
        self._connection = Connection(row, root, settings or EnvPoolSettings())
        self._first_view = ""
        self._episode: EpisodeReward | None = None
        self._done = True

    @property
    def episode_reward(self) -> float:
        """The reward of the episode up to its last valid step, on a scale whose best is 1."""
        return self._episode.total if self._episode else 0.0

    @property
    def success(self) -> bool:
        return self._episode.success if self._episode else False

    def create(self) -> None:
        """Creates a new game on the server."""
        with self._reporting():
            answer = self._call("create", "POST", self.row.create_body)
            identifier = (
                answer if self.row.bare_id else self._field(answer, self.row.id_field, "create")
            )
            if isinstance(identifier, bool) or not isinstance(identifier, int | str):
                raise self._malformed("create", f"no session id in {shortened(repr(answer))}")
            self.id = identifier

    def reset(self, item: int) -> str:
        """Starts the episode of task `item` and returns its first observation."""
        self._episode, self._done = None, True
        body = self._with_id({**self.row.reset_extra, self.row.item_field: item})
        with self._reporting(item):
            answer = self._call("reset", "POST", body)
            if isinstance(answer, dict) and answer.get(self.row.id_field, self.id) != self.id:
                raise self._malformed("reset", f"another session: {shortened(repr(answer))}")
            self._check_backend("reset", answer)
            look = None
            if self.row.look:
                look = self._call(f"{self.row.look}?{urlencode(self._with_id({}))}", "GET")
            try:
                view = self.row.first_view(answer, look)
            except (KeyError, TypeError, IndexError, AttributeError) as error:
                detail = f"no observation in {shortened(repr(answer))}"
                raise self._malformed("reset", detail) from error
            if not isinstance(view, str):
                raise self._malformed("reset", f"the observation is {shortened(repr(view))}")
        self._note_actions(answer)
        self._first_view = view
        self._episode, self._done = EpisodeReward(self.row.reward), False
        return _encodable(view)

    def step(self, action: str) -> StepResult:
        """Plays one action (or the model's full text, where the server parses it)."""
        if self._episode is None or self._done:
            raise RuntimeError(f"{self.row.name}: the episode is over or not begun; call reset")
        body = self._with_id({"action": action})
        with self._reporting():
            answer = self._call("step", "POST", body)
            view = self._field(answer, self.row.view_field, "step")
            done = self._field(answer, self.row.done_field, "step")
            value = self._field(answer, self.row.reward.field, "step")
            types = isinstance(view, str), isinstance(done, bool), isinstance(value, int | float)
            if not all(types):
                raise self._malformed("step", f"wrong types in {shortened(repr(answer))}")
            self._check_backend("step", answer)
            if self.row.shares_ids:
                self._check_alone()
            done = done or any(marker in view for marker in self.row.done_markers)
            try:
                reward = self._episode.record(value, done)
            except (ValueError, OverflowError) as error:
                raise self._malformed("step", f"{error} in {shortened(repr(answer))}") from error
        self._done = done
        self._note_actions(answer)
        used = (self.row.view_field, self.row.done_field)
        info = {key: part for key, part in answer.items() if key not in used}
        if self.listener:
            self.listener(None)
        return StepResult(_encodable(view), reward, done, info)

    def _note_actions(self, answer: Any) -> None:
        listed = answer.get("available_actions") if isinstance(answer, dict) else None
        actions = listed if isinstance(listed, list) else ()
        self.available_actions = tuple(_encodable(str(action)) for action in actions)

    def close(self) -> None:
        """Closes the game, where the server has a route for that, and the connection."""
        path = f"{self.row.prefix}/close"
        try:
            if self.id is None:
                return
            response = self._connection.call("POST", path, self._with_id({}), _CLOSE_TIMEOUT)
            # AgentGym servers without a close route answer 404; the embedded ones all have one.
            expected = (200,) if self.row.closes else (200, 404, 405)
            if response.status not in expected:
                detail = f"HTTP {response.status}: {shortened(response.text)}"
                raise self._failure(FailureKind.STATUS, "close", detail)
        finally:
            self.id = None
            self._connection.close()

    def limit(self, deadline: float) -> None:
        """Ends all calls but `close` at this time of the monotonic clock."""
        self._connection.deadline = deadline

    def disconnect(self) -> None:
        """Drops the connection and keeps the game; the next call connects again."""
        self._connection.close()

    def _with_id(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.id is None:
            raise RuntimeError(f"{self.row.name}: the session is closed or not created")
        return {self.row.id_field: self.id, **body}

    @contextmanager
    def _reporting(self, item: int | None = None) -> Iterator[None]:
        """Reports a failure in the block to the listener.

        If the server refuses an item that AgentGym does not have, the dataset is at fault.
        """
        try:
            yield
        except EnvironmentFailure as failure:
            items, kind, detail = self.row.items, failure.kind, failure.detail
            if item is not None and (kind.refusal or kind is FailureKind.MALFORMED):
                if kind.refusal and items and item not in items:
                    kind = FailureKind.ITEM
                    detail = f"item {item} is outside {items.start}..{items.stop - 1}; {detail}"
                failure = EnvironmentFailure(
                    kind, failure.env, failure.url, failure.call, detail, refused_item=item
                )
            if self.listener:
                self.listener(failure)
            raise failure from failure.__cause__

    def _call(self, route: str, method: str, body: Any = None) -> Any:
        if self.id is not None:  # before `create` there is nothing to lose
            self._check_incarnation(route)
        with STATUS.working(f"{self.row.name} server {self.root}: {route}"):
            answer = self._connection.json(method, f"{self.row.prefix}/{route}", body)
        # The server may have been replaced during the call.
        self._check_incarnation(route)
        return answer

    def _check_incarnation(self, route: str) -> None:
        if self._incarnation is not None and self._incarnation.ended():
            detail = "the server has restarted, and its sessions are lost"
            raise self._failure(FailureKind.RESTARTED, route, detail)

    def _check_alone(self) -> None:
        """Raises if another client has reset the session: the step was scored in its game.

        The server shows the task of the last reset even after a step.
        """
        seen = self._call(f"observation?{urlencode(self._with_id({}))}", "GET")
        if seen != self._first_view:
            detail = (
                f"another client plays in session {self.id}; AgentGym's {self.row.name} server "
                "gives the same sessions to all clients: use a server of your own"
            )
            raise self._failure(FailureKind.DUPLICATE_ID, "step", detail)

    def _field(self, answer: Any, key: str, route: str) -> Any:
        if not isinstance(answer, dict) or key not in answer:
            raise self._malformed(route, f"no {key!r} in {shortened(repr(answer))}")
        return answer[key]

    def _check_backend(self, route: str, answer: Any) -> None:
        try:
            failed = self.row.backend_failed(answer)
        except (KeyError, TypeError, AttributeError) as error:
            raise self._malformed(route, f"no observation in {shortened(repr(answer))}") from error
        if failed:
            detail = f"a service that the server depends on failed: {shortened(repr(answer))}"
            raise self._failure(FailureKind.BACKEND, route, detail)

    def _malformed(self, route: str, detail: str) -> EnvironmentFailure:
        return self._failure(FailureKind.MALFORMED, route, detail)

    def _failure(self, kind: FailureKind, route: str, detail: str) -> EnvironmentFailure:
        return self._connection.failure(kind, "POST", f"{self.row.prefix}/{route}", detail)


def _encodable(text: str) -> str:
    # An escape in JSON can be a lone surrogate, which tokenizers and files reject.
    return text.encode("utf-8", "replace").decode("utf-8")

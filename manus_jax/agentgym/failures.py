"""Failures between an agent and its environment server, as one typed exception.

A response that belongs to the game (an unknown action, a wrong word) is an observation; anything
else (a timeout, a 500, an HTML page) is an `EnvironmentFailure`. A failure never becomes a reward
of zero. Its kind determines whether a new session may succeed.
"""

import enum

_SHOWN = 200


class FailureKind(enum.StrEnum):
    """Why a call failed; the value is the name in the counters."""

    TIMEOUT = "timeout"  # no answer in time
    OVERDUE = "overdue"  # no answer in the time that the episode had left
    CONNECTION = "connection"  # refused, reset or dropped
    STATUS = "status"  # an HTTP status other than 200
    ERROR_ANSWER = "error_answer"  # HTTP 200 with {"error": ...}
    MALFORMED = "malformed"  # too long, broken JSON, a missing field, a value of the wrong type
    NOT_AGENTGYM = "not_agentgym"  # HTML, or none of the protocol's routes
    BACKEND = "backend"  # a service that the server depends on failed
    ITEM = "item"  # the server refused an item outside the environment's range
    DUPLICATE_ID = "duplicate_id"  # create returned an id that is in use
    RESTARTED = "restarted"  # the server process that created the session has ended
    NO_SERVER = "no_server"  # no session became free in time

    @property
    def lost_contact(self) -> bool:
        """Whether the server is gone or hangs, so that its other sessions are suspect too."""
        return self in (FailureKind.TIMEOUT, FailureKind.CONNECTION, FailureKind.NOT_AGENTGYM)

    @property
    def refusal(self) -> bool:
        """Whether the server refused to create a session or an episode."""
        refused = (FailureKind.STATUS, FailureKind.ERROR_ANSWER, FailureKind.BACKEND)
        return self in (*refused, FailureKind.DUPLICATE_ID)

    @property
    def retryable(self) -> bool:
        """Whether a fresh session may succeed."""
        return self not in (FailureKind.ITEM, FailureKind.NO_SERVER, FailureKind.OVERDUE)


class EnvironmentFailure(Exception):
    """An infrastructure failure. The episode must not become a training sample.

    `refused_item` is the item that a server which answers could not start.
    """

    def __init__(
        self,
        kind: FailureKind,
        env: str,
        url: str,
        call: str,
        detail: str,
        refused_item: int | None = None,
    ) -> None:
        super().__init__(f"{env} at {url}: {call}: {detail}")
        self.kind = kind
        self.env = env
        self.url = url
        self.call = call
        self.detail = detail
        self.refused_item = refused_item

    @property
    def retryable(self) -> bool:
        return self.kind.retryable


def shortened(text: str) -> str:
    """One line of at most about 200 characters, for messages that quote an answer."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}… ({len(text)} characters)"

"""A client for servers with OpenAI's chat API: external models as policies and judges.

A call is bounded in time and size. Lost connections, time-outs, rate limits and errors of the
server are tried again after a back-off; anything else that the server refuses is not.
"""

import dataclasses
import http.client
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from manus_jax.errors import UserError
from manus_jax.limits import url_problem
from manus_jax.servers.bounded_http import BadResponse, exchange, parse_json, request_head
from manus_jax.servers.health import BackOff

KEY_VARIABLE = "OPENAI_API_KEY"
MAX_RESPONSE = 16 << 20
ATTEMPTS = 4
PROBE = ({"role": "user", "content": "Answer with one word."},)
_PROBE_SECONDS = 30.0
_AGAIN = {408, 409, 429, *range(500, 600)}


class ChatApiError(UserError, RuntimeError):
    """The server did not complete a chat, after all attempts."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """The text of an answer; `cut` if the token limit ended it."""

    text: str
    cut: bool


@dataclasses.dataclass(frozen=True)
class ChatApi:
    """A model behind `URL/chat/completions`. The key, if any, is in OPENAI_API_KEY. Thread-safe."""

    model: str
    url: str
    timeout: float = 120.0
    back_off: BackOff = dataclasses.field(default_factory=BackOff)

    @classmethod
    def parse(cls, text: str) -> "ChatApi":
        """Reads MODEL@URL, such as gpt-x@https://host/v1; ValueError for anything else."""
        model, _, url = text.rpartition("@")
        if not model:
            raise ValueError(f"{text!r} must be MODEL@URL, such as MODEL@http://HOST:PORT/v1")
        problem = url_problem(url)
        if problem is None and "://" not in url:
            problem = "is not an address: write http://HOST:PORT/v1"
        if problem is not None:
            raise ValueError(f"{text!r} must be MODEL@URL: {url!r} {problem}")
        return cls(model, url.rstrip("/"))

    def complete(
        self,
        messages: Sequence[dict[str, str]],
        sleep: Callable[[float], object] = time.sleep,
        **options: Any,
    ) -> Completion:
        """The model's next message. `options` are fields of the request, such as max_tokens."""
        return self._parsed(self._answer(messages, sleep, options))

    def require_answer(self) -> None:
        """Asks for one token; ChatApiError unless the server, the model and the key can be used."""
        timeout = min(self.timeout, _PROBE_SECONDS)
        probed = dataclasses.replace(self, timeout=timeout)
        content = probed._answer(PROBE, time.sleep, {"max_tokens": 1})
        try:
            parse_json(content)["choices"][0]["message"]  # a single token may be part of a thought
        except (BadResponse, LookupError, TypeError) as error:
            raise self._no_completion(error) from None

    def _answer(
        self,
        messages: Sequence[dict[str, str]],
        sleep: Callable[[float], object],
        options: Mapping[str, Any],
    ) -> bytes:
        """The content of a response with status 200, after several attempts if need be."""
        body = json.dumps({"model": self.model, "messages": list(messages), **options}).encode()
        head = self.head()
        problem = ""
        for attempt in range(1, ATTEMPTS + 1):
            if attempt > 1:
                sleep(self.back_off.seconds(attempt - 1, random.random()))
            try:
                status, content = self._post(head, body)
            except (OSError, BadResponse) as error:
                problem = f"{type(error).__name__}: {error}" if str(error) else "no answer in time"
                continue
            if status == 200:
                return content
            problem = f"status {status}: {content[:200].decode(errors='replace')}"
            if status not in _AGAIN:
                break
        raise ChatApiError(f"{self.model} at {self.url}: {problem}")

    def head(self) -> bytes:
        """The header lines of a request; ChatApiError if the key cannot be sent."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        try:
            return request_head(urlsplit(self.url).netloc, headers)
        except ValueError as error:
            raise ChatApiError(f"{KEY_VARIABLE} cannot be sent: {error}") from None

    def _post(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        try:
            connection.connect()
            path = f"{parts.path}/chat/completions"
            return exchange(connection, "POST", path, head, body, self.timeout, MAX_RESPONSE)
        finally:
            connection.close()

    def _parsed(self, content: bytes) -> Completion:
        try:
            choice = parse_json(content)["choices"][0]
            text = choice["message"]["content"]
            if not isinstance(text, str):
                raise TypeError("the message has no text")
        except (BadResponse, LookupError, TypeError) as error:
            raise self._no_completion(error) from None
        # An escape in JSON can be a lone surrogate, which files reject.
        text = text.encode("utf-8", "replace").decode("utf-8")
        return Completion(text, choice.get("finish_reason") == "length")

    def _no_completion(self, error: Exception) -> ChatApiError:
        return ChatApiError(f"{self.model} at {self.url} gave no chat completion: {error!r}")

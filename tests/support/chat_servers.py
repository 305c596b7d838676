"""Servers with OpenAI's chat API, made of a function from messages to a text."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from scripted_servers import Reply, serving

from manus_jax.servers.chat_api import PROBE


def completion(text: str, cut: bool) -> Reply:
    choice = {
        "message": {"role": "assistant", "content": text},
        "finish_reason": "length" if cut else "stop",
    }
    return Reply(json.dumps({"choices": [choice]}))


@contextlib.contextmanager
def chatting(
    reply: Callable[[list[dict[str, str]]], str | Reply], seen: list[Any] | None = None
) -> Iterator[str]:
    """Serves `reply` for the length of the block; gives the URL with /v1. `seen` gets requests.

    The request that asks whether the server answers is not passed to `reply`.
    """

    def answer(method: str, path: str, body: Any) -> Reply:
        assert (method, path) == ("POST", "/v1/chat/completions")
        if body["messages"] == [*PROBE]:
            return completion("Yes.", cut=True)
        if seen is not None:
            seen.append(body)
        text = reply(body["messages"])
        if isinstance(text, Reply):
            return text
        cut = len(text.split()) > body.get("max_tokens", 10**9)
        return completion(text, cut)

    with serving(answer) as url:
        yield f"{url}/v1"

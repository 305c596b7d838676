"""OpenAI's chat completions as data: requests are checked and read, replies are written.

A field that changes the sample and that no engine supports is an error, not ignored. Fields that
do not change it, such as `user`, are accepted.
"""

import dataclasses
import json
import math
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from manus_jax.data.chat import ConversationError, Message, message_from_record
from manus_jax.data.tool_calls import ToolCall, ToolCallError, parse_tool_calls

MAX_CHOICES = 128
MAX_STOPS = 4
_ROLES = {"developer": "system"}
_READ = {
    *("model", "messages", "tools", "tool_choice", "n", "stop", "seed", "logprobs", "top_logprobs"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"),
    *("stream", "stream_options"),
}
_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "verbosity"),
}
_DEFAULTS: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
"""Fields that are accepted with the value that has no effect."""


class ApiError(Exception):
    """A refused request, with OpenAI's fields."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def context_exceeded(room: int, most: int) -> ApiError:
    """The messages leave `room` of `most` tokens for a reply, which is too few.

    The end of the message is OpenAI's, by which clients such as verifiers know this error.
    """
    return ApiError(
        400,
        f"the messages leave {max(0, room)} of {most} tokens for a reply: this model's maximum "
        f"context length is {most} tokens",
        "context_length_exceeded",
        "messages",
    )


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A request; None where it leaves the choice to the server."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    n: int
    stop: tuple[str, ...]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    logprobs: bool
    stream: bool
    stream_usage: bool


def read_request(body: Any) -> ChatRequest:
    """Reads the JSON body of a request; ApiError names the field that is wrong."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        if name in _DEFAULTS and value != _DEFAULTS[name]:
            raise ApiError(400, f"{name} = {json.dumps(value)[:80]} is not supported", param=name)
        if name not in _READ and name not in _WITHOUT_EFFECT and name not in _DEFAULTS:
            raise ApiError(400, f"unknown field {name!r}", param=name)
    if _number(body, "top_logprobs", int, 0, 20):
        raise ApiError(
            400,
            "log-probs are those of the sampled tokens; there are no others",
            None,
            "top_logprobs",
        )
    most = _number(body, "max_completion_tokens", int, 1, 2**22)
    options = _typed(body, "stream_options", dict, {})
    return ChatRequest(
        model=_typed(body, "model", str, ""),
        messages=_messages(body.get("messages")),
        tools=_tools(body),
        n=_number(body, "n", int, 1, MAX_CHOICES) or 1,
        stop=_stop(body.get("stop", ())),
        max_tokens=_number(body, "max_tokens", int, 1, 2**22) if most is None else most,
        temperature=_number(body, "temperature", float, 0, 100),
        top_p=_number(body, "top_p", float, 1e-9, 1),
        top_k=_number(body, "top_k", int, 0, 10**7),
        seed=_number(body, "seed", int, -(2**63), 2**63),
        logprobs=_typed(body, "logprobs", bool, False),
        stream=_typed(body, "stream", bool, False),
        stream_usage=options.get("include_usage") is True,
    )


def _typed(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name, default)
    if not isinstance(value, kind):
        raise ApiError(400, f"{name} must be of type {kind.__name__}", param=name)
    return value


def _number(body: dict[str, Any], name: str, kind: type, low: float, high: float) -> Any:
    value = body.get(name)
    if value is None:
        return None
    fits = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
    if not fits or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise ApiError(400, f"{name} must be {what} from {low:g} to {high:g}", param=name)
    return value


def _stop(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    valid = isinstance(stops, list | tuple) and len(stops) <= MAX_STOPS
    if not valid or not all(isinstance(text, str) and text for text in stops):
        raise ApiError(
            400, f"stop must be at most {MAX_STOPS} texts that are not empty", None, "stop"
        )
    return tuple(stops)


def _tools(body: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools that the model is shown. It is never forced to call one."""
    tools, choice = body.get("tools", []), body.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and tool.get("type") == "function" and "function" in tool
        for tool in tools
    ):
        raise ApiError(400, "tools must be a list of functions", param="tools")
    if choice not in ("none", "auto", "required") and not isinstance(choice, dict):
        raise ApiError(
            400, "tool_choice must be none, auto, required or an object", param="tool_choice"
        )
    return () if choice == "none" else tuple(tools)


def _messages(records: Any) -> tuple[Message, ...]:
    if not isinstance(records, list) or not records:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    return tuple(_message(number, record) for number, record in enumerate(records))


def _message(number: int, record: Any) -> Message:
    where = f"messages.{number}"
    if not isinstance(record, dict):
        raise ApiError(400, f"{where} must be an object", param=where)
    role, content = record.get("role"), record.get("content")
    if isinstance(content, list):
        parts: list[Any] = [
            part.get("text") if isinstance(part, dict) else part for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise ApiError(400, f"{where}: only text is supported", param=where)
        content = "".join(parts)
    if content is None and role == "assistant":
        content = ""
    plain = {"role": _ROLES.get(str(role), role), "content": content}
    if role == "assistant" and record.get("tool_calls"):
        plain["tool_calls"] = record["tool_calls"]
    try:
        message = message_from_record(plain)
    except ConversationError as error:
        raise ApiError(400, f"{where}: {error}", param=where) from None
    return dataclasses.replace(message, train=False)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One reply: what the client gets, and the log-probs of its tokens if it asked for them."""

    content: str
    calls: tuple[ToolCall, ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    tokens: tuple[tuple[str, float], ...] | None  # (text, log-prob)

    @property
    def message(self) -> Message:
        return Message("assistant", self.content, tool_calls=self.calls)


def make_choice(
    text: str,
    request: ChatRequest,
    cut: bool,
    tokens: tuple[tuple[str, float], ...] | None = None,
) -> Choice:
    """The reply for a sampled text: without the stop text, and with its tool calls.

    A call that cannot be read stays part of the text.
    """
    ends = [at for stop in request.stop if (at := text.find(stop)) >= 0]
    content = text[: min(ends)] if ends else text
    calls: tuple[ToolCall, ...] = ()
    if request.tools and not cut:
        thought, end, answer = content.rpartition("</think>")
        try:
            before, calls = parse_tool_calls(answer)
        except ToolCallError:
            calls = ()
        if calls:
            content = thought + end + before
    reason: Literal["stop", "length", "tool_calls"] = "length" if cut else "stop"
    return Choice(content, calls, "tool_calls" if calls else reason, tokens)


def completion(
    request: ChatRequest, choices: Sequence[Choice], prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    """The response to a request."""
    shown = [
        {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **_content(choice)},
            "finish_reason": choice.finish_reason,
            "logprobs": _log_probs(choice),
        }
        for index, choice in enumerate(choices)
    ]
    return {
        **_head("chat.completion", request),
        "choices": shown,
        "usage": _usage(prompt_tokens, completion_tokens),
    }


def completion_events(
    request: ChatRequest, choices: Sequence[Choice], prompt_tokens: int, completion_tokens: int
) -> str:
    """The response to a request with `stream`, as server-sent events.

    Engines return whole turns, so each reply is one event.
    """
    head = _head("chat.completion.chunk", request)
    events: list[dict[str, Any]] = []
    for index, choice in enumerate(choices):
        delta = {"role": "assistant", **_content(choice)}
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        first = {"index": index, "delta": delta, "finish_reason": None}
        last = {"index": index, "delta": {}, "finish_reason": choice.finish_reason}
        events += [
            {**head, "choices": [{**first, "logprobs": _log_probs(choice)}]},
            {**head, "choices": [{**last, "logprobs": None}]},
        ]
    if request.stream_usage:
        events.append({**head, "choices": [], "usage": _usage(prompt_tokens, completion_tokens)})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def _head(kind: str, request: ChatRequest) -> dict[str, Any]:
    name = f"chatcmpl-{uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": request.model}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _content(choice: Choice) -> dict[str, Any]:
    if not choice.calls:
        return {"content": choice.content}
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in choice.calls
    ]
    return {"content": choice.content or None, "tool_calls": calls}


def _log_probs(choice: Choice) -> dict[str, Any] | None:
    if choice.tokens is None:
        return None
    content = [
        {
            "token": text,
            "bytes": list(text.encode("utf-8", "replace")),
            "logprob": log_prob,
            "top_logprobs": [],
        }
        for text, log_prob in choice.tokens
    ]
    return {"content": content, "refusal": None}

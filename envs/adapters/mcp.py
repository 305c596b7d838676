"""`mcp:COMMAND`: the tools of an MCP server as actions.

The command, such as `python my_tools.py`, starts a server that speaks MCP over its standard input
and output. Every episode has a server of its own, so that nothing is left of the last one. An
action is `NAME with Action Input: {json}`; the tool `finish` ends the episode. The environment
gives no reward: tasks are in data files, and a reward function compares what happened with them.
"""

import asyncio
import functools
import json
import re
import shlex
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TextIO

from envs.adapters.adapted_game import require_package
from envs.game import ClientTool, ClientView, EnvironmentSpec, GameError, Step
from envs.registry import UnknownEnvironment
from envs.weather.game import FORMAT_ERROR, parse

FINISH = "finish"
START_SECONDS, CALL_SECONDS = 60.0, 120.0
_SAMPLES = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


@functools.cache
def adapted(command: str) -> EnvironmentSpec:
    """The environment of a server; UnknownEnvironment if it does not start or has no tools."""
    require_package(f"mcp:{command}", "mcp", "mcp")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UnknownEnvironment(f"mcp:{command} is not a command: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise UnknownEnvironment(f"mcp:{command}: there is no program {''.join(words[:1])!r}")
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            server = _Server(words, errors)
        except UnknownEnvironment as error:
            errors.seek(0)
            last = errors.read().strip().rpartition("\n")[2][-300:]
            raise UnknownEnvironment(f"{error}; it wrote: {last}" if last else str(error)) from None
        tools = server.tools
        server.close()
    if not tools or FINISH in tools:
        problem = "has a tool 'finish', which ends an episode here" if tools else "has no tools"
        raise UnknownEnvironment(f"mcp:{command}: the server {problem}")
    finish = ClientTool(
        FINISH,
        "Ends the task.",
        {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    )
    shown = (*tools.values(), finish)
    actions = [f"{tool.name} with Action Input: {json.dumps(_sample(tool))}" for tool in shown]
    return EnvironmentSpec(
        name=f"mcp:{command}",
        health="ok",
        family="id",
        item_field="data_idx",
        new_game=lambda: McpGame(words, shown),
        items=_no_items,
        plausible_actions=lambda observations: actions,
        client=ClientView(
            instruction="You solve a task with tools. When you are done, call finish.",
            actions=tuple(map(_line, shown)),
            tools=shown,
        ),
    )


def _no_items(split: str) -> Sequence[int]:
    raise GameError(
        "an MCP server has no tasks: list them with their prompts in data.train_files and "
        "data.val_files"
    )


def _properties(tool: ClientTool) -> Mapping[str, Any]:
    return tool.parameters.get("properties", {})


def _line(tool: ClientTool) -> str:
    return f"{tool.name}({', '.join(_properties(tool))}): {' '.join(tool.description.split())}"


def _sample(tool: ClientTool) -> dict[str, Any]:
    """Arguments of the right types, for a random policy."""
    required = tool.parameters.get("required", ())
    return {
        name: (about.get("enum") or [_SAMPLES.get(about.get("type", ""), "text")])[0]
        for name, about in _properties(tool).items()
        if name in required
    }


class McpGame:
    """One episode with a server of its own."""

    def __init__(self, words: Sequence[str], tools: Sequence[ClientTool]) -> None:
        self._words = words
        self._begin = "The tools are:\n" + "\n".join(map(_line, tools)) + "\nGive me one action."
        self._server: _Server | None = None
        self._seen, self._done = "", False

    def reset(self, item: int) -> str:
        self.close()
        self._server = _Server(self._words)
        self._seen, self._done = self._begin, False
        return self._seen

    def step(self, action: str) -> Step:
        if self._server is None or self._done:
            raise GameError("Reset before the next step.")
        call = parse(action)
        if call is None:
            self._seen = FORMAT_ERROR
        elif call[0] == FINISH:
            self._seen, self._done = "The task has ended.", True
        else:
            self._seen = f"Observation: {self._server.call(*call)}\nGive me one action."
        return Step(self._seen, 0.0, self._done)

    def observation(self) -> str:
        if self._server is None:
            raise GameError("Reset before the first observation.")
        return self._seen

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class _Server:
    """A running server. `tools` are those that it has, by names that are words. It writes its
    errors to a file, or nowhere."""

    def __init__(self, words: Sequence[str], errors: TextIO | None = None) -> None:
        self.tools: dict[str, ClientTool] = {}
        self._names: dict[str, str] = {}
        self._calls: asyncio.Queue[tuple[str, Any, Future[str]] | None] = asyncio.Queue()
        self._ready: Future[None] = Future()
        self._run = asyncio.run_coroutine_threadsafe(self._serve(words, errors), _loop())
        try:
            self._ready.result(START_SECONDS)
        except Exception as error:  # whatever the client raises
            self._run.cancel()
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):  # of the client's tasks
                cause = cause.exceptions[0]
            reason = " ".join(f"{type(cause).__name__}: {cause}".split())
            if isinstance(cause, TimeoutError):
                reason = f"no answer within {START_SECONDS:g} s"
            raise UnknownEnvironment(
                f"mcp:{shlex.join(words)}: the server does not start: {reason}"
            ) from error

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a tool's result; errors of the tool are texts as well."""
        if name not in self._names:
            return f"Error: there is no tool {name[:80]!r}"
        result: Future[str] = Future()
        given = (self._names[name], arguments, result)
        _loop().call_soon_threadsafe(self._calls.put_nowait, given)
        return result.result(CALL_SECONDS)

    def close(self) -> None:
        _loop().call_soon_threadsafe(self._calls.put_nowait, None)

    async def _serve(self, words: Sequence[str], errors: TextIO | None) -> None:
        from mcp import ClientSession, StdioServerParameters, stdio_client

        try:
            # The contexts must be left by the task that entered them.
            parameters = StdioServerParameters(command=words[0], args=[*words[1:]])
            with open("/dev/null", "w", encoding="utf-8") as nowhere:
                async with (
                    stdio_client(parameters, errlog=errors or nowhere) as streams,
                    ClientSession(*streams) as session,
                ):
                    await session.initialize()
                    for tool in (await session.list_tools()).tools:
                        name = re.sub(r"\W", "_", tool.name)
                        self._names[name] = tool.name
                        schema = tool.input_schema
                        self.tools[name] = ClientTool(name, tool.description or tool.name, schema)
                    self._ready.set_result(None)
                    while (call := await self._calls.get()) is not None:
                        await _answer(session, *call)
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise


async def _answer(session: Any, name: str, arguments: Any, result: "Future[str]") -> None:
    try:
        made = await session.call_tool(name, arguments)
    except Exception as error:  # the server is lost: the episode is played again
        result.set_exception(error)
        return
    text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in made.content)
    result.set_result(f"Error: {text}" if made.is_error else text)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all servers, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop

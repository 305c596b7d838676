"""Servers of the standard library that stand for AgentGym's in tests: recorded and faulty ones.

A server is a function (method, path, body) → Reply on a real socket, so that the client under test
speaks real HTTP with it.
"""

import contextlib
import itertools
import json
import random
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from manus_jax.agentgym.table import EnvironmentRow

TRANSCRIPTS = Path(__file__).parent / "transcripts"


@dataclass(frozen=True)
class Reply:
    text: str
    status: int = 200
    content_type: str = "application/json"


class Hang(Exception):
    """The request gets no answer until the server is shut down."""


class HangUp(Exception):
    """The connection is closed without an answer."""


Answer = Callable[[str, str, Any], Reply]


@contextlib.contextmanager
def serving(
    answer: Answer,
    connections: set[socket.socket] | None = None,
    idle_limit: float | None = None,
    closes: str = "",
    port: int = 0,
) -> Iterator[str]:
    """Serves a function on a port (0: a free one) for the length of the block; gives the URL.

    `connections` receives the open sockets, so that a test can break them like the end of a
    process does. Connections are closed when idle for `idle_limit` seconds, and after every
    response if `closes` says in which way.
    """
    ending = threading.Event()
    opened: set[socket.socket] = set() if connections is None else connections

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0" if closes == "HTTP/1.0" else "HTTP/1.1"
        timeout = idle_limit
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            opened.add(self.connection)

        def finish(self) -> None:
            opened.discard(self.connection)
            with contextlib.suppress(OSError):  # a test broke the connection
                super().finish()

        def _respond(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length)
            try:
                reply = answer(self.command, self.path, json.loads(raw) if raw else None)
            except Hang:
                ending.wait()
                self.close_connection = True
                return
            except HangUp:
                self.close_connection = True
                return
            content = reply.text.encode()
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Content-Length", str(len(content)))
            if closes == "Connection: close":
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _respond

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

        def handle_error(self, *arguments: Any) -> None:
            pass  # clients of these servers hang up on purpose

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ending.set()
        server.shutdown()
        server.server_close()
        thread.join()


def recorded(name: str, prefix: str = "") -> Answer:
    """The server of a transcript: answers a request as the real one did, in the recorded order.

    create is matched by its path alone, as what it is given does not matter to any server. A reset
    leaves behind what was recorded before it (such as a step too early), for that session.
    """
    replies: dict[tuple[str, str, str], deque[tuple[int, Reply]]] = defaultdict(deque)
    lines = (TRANSCRIPTS / f"{name}.jsonl").read_text().splitlines()
    for index, line in enumerate(lines):
        entry = json.loads(line)
        request = entry["request"]
        path = request["path"] if request["path"] == "/" else prefix + request["path"]
        if path.endswith("/create") and entry["status"] != 200:
            continue
        reply = Reply(entry["response_text"], entry["status"])
        replies[_key(request["method"], path, request["body"])].append((index, reply))
    if not replies["GET", "/", "null"]:
        replies["GET", "/", "null"].append((0, Reply('"ok"')))

    def answer(method: str, path: str, body: Any) -> Reply:
        queue = replies.get(_key(method, path, body))
        if not queue:
            return Reply(json.dumps({"detail": f"not recorded: {method} {path} {body}"}), 404)
        index, reply = queue.popleft() if len(queue) > 1 else queue[0]
        if path.endswith("/reset"):
            owner = json.dumps({field: body[field] for field in ("id", "env_idx") if field in body})
            for (_, other, text), later in replies.items():
                if other.endswith("/step") and owner.strip("{}") in text:
                    while len(later) > 1 and later[0][0] < index:
                        later.popleft()
        return reply

    return answer


def _key(method: str, path: str, body: Any) -> tuple[str, str, str]:
    return method, path, "" if path.endswith("/create") else json.dumps(body, sort_keys=True)


class TextcraftStub:
    """A game of textcraft's shape: `win` wins, anything else goes on.

    `faults` maps a route such as "step" to what happens there instead: a Reply, or an exception.
    """

    def __init__(self) -> None:
        self.faults: dict[str, Reply | type[Exception]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.ids = iter(range(1_000_000))
        self.live: set[int] = set()
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str, body: Any) -> Reply:
        route = path.strip("/")
        with self._lock:
            self.calls.append((route, body))
            fault = self.faults.get(route)
            if fault is None:
                return Reply(json.dumps(self._play(route, body)))
        if isinstance(fault, Reply):
            return fault
        raise fault

    def _play(self, route: str, body: Any) -> Any:
        if route == "":
            return "This is environment TextCraft."
        if route == "create":
            identifier = next(self.ids)
            self.live.add(identifier)
            return {"id": identifier, "observation": "", "done": False, "reward": 0}
        if body["id"] not in self.live:
            return {"error": f"The id {body['id']} is not valid."}
        if route == "reset":
            view = f"task {body['data_idx']}"
            return {"id": body["id"], "observation": view, "done": False, "reward": 0}
        if route == "step":
            won = body["action"] == "win"
            return {"observation": body["action"], "reward": int(won), "done": won}
        self.live.remove(body["id"])
        return True


class RestartableServer:
    """An imitation of any environment's server whose observations name the item in play.

    `restart` does what the end of a process and the start of the next do: sessions are gone, and
    ids are counted from the beginning; `breaks_connections` says whether anyone can notice.
    The games of the tool environments, textcraft and searchqa can be played right after create.
    """

    def __init__(self, row: EnvironmentRow) -> None:
        self.row = row
        self.connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self.down = False
        self.items: dict[int, int | None] = {}
        if self.row.name == "sqlgym":
            self._ids = itertools.cycle(range(300_000, 300_008))
        elif self.row.name == "webshop":
            self._ids = iter(random.sample(range(10**8), 1000))
        else:
            self._ids = itertools.count()

    def restart(self, breaks_connections: bool = True) -> None:
        with self._lock:
            self._begin()
            for connection in list(self.connections) if breaks_connections else []:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def __call__(self, method: str, path: str, body: Any) -> Reply:
        row = self.row
        if self.down:
            raise HangUp
        route = path.removeprefix(row.prefix).strip("/").partition("?")[0]
        if route == "":
            return Reply('"ok"')
        with self._lock:
            if route == "create":
                number = next(self._ids)
                playable = row.create_body is not None
                self.items.setdefault(number, 0 if playable else None)
                return Reply(json.dumps(number if row.bare_id else {row.id_field: number}))
            if method == "GET":
                body = {row.id_field: int(path.rpartition("=")[2])}
            number = body[row.id_field]
            if number not in self.items or (self.items[number] is None and route == "step"):
                if row.id_field == "id":
                    return Reply(json.dumps({"error": f"The id {number} is not valid."}))
                return Reply("Internal Server Error", 500)
            return Reply(json.dumps(getattr(self, f"_{route}")(number, body)))

    def _reset(self, number: int, body: Any) -> Any:
        self.items[number] = body[self.row.item_field]
        seen = self._observation(number, body)
        if self.row.name == "sqlgym":
            return [seen, None]
        if self.row.action in ("tool_call", "search_tags"):
            return seen
        return {"observation": seen, "task_description": seen, "available_actions": ["look"]}

    def _observation(self, number: int, body: Any) -> str:
        return f"item {self.items[number]}"

    def _filtered_vocab(self, number: int, body: Any) -> list[str]:
        return ["arise"]

    def _step(self, number: int, body: Any) -> Any:
        row, done = self.row, "last" in body["action"]
        seen = {row.view_field: self._observation(number, body), row.done_field: done}
        return {**seen, row.reward.field: row.reward.high if done else 0, "info": {}}

    def _close(self, number: int, body: Any) -> bool:
        del self.items[number]
        return True

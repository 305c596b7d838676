"""Servers of the standard library that stand for AgentGym's in tests: recorded and faulty ones.

A server is a function (method, path, body) → Reply on a real socket, so that the client under test
speaks real HTTP with it.
"""

import contextlib
import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

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
def serving(answer: Answer) -> Iterator[str]:
    """Serves a function on a free port for the length of the block; gives the URL."""
    ending = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

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
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _respond

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    server = Server(("127.0.0.1", 0), Handler)
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

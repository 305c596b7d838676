"""Servers that answer as the source code of AgentGym's servers does, where no recording exists.

Routes, field names, the shapes of failures and the meaning of reward and done are AgentGym's; the
games behind them are a few lines each, just enough to be won, lost and broken.
"""

import ast
import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from scripted_servers import Answer, Reply

Routes = dict[str, tuple[tuple[str, ...], Callable[..., Any]]]
""" "METHOD /path" → (names of the obligatory fields, handler of all the fields)."""

QUART_ERROR = (
    "<!doctype html>\n<html lang=en>\n<title>500 Internal Server Error</title>\n"
    "<h1>Internal Server Error</h1>\n<p>The server encountered an internal error.</p>\n"
)


def _called(routes: Routes, method: str, path: str, body: Any) -> tuple[Any, dict[str, Any]]:
    """The route of a request and its fields; KeyError where there is no such route."""
    parts = urlsplit(path)
    query = {key: int(values[0]) for key, values in parse_qs(parts.query).items()}
    return routes[f"{method} {parts.path}"], {**query, **(body or {})}


def fastapi(routes: Routes) -> Answer:
    """A FastAPI server: 404, 422 for missing fields, 500 for an exception, all but HTML."""

    def answer(method: str, path: str, body: Any) -> Reply:
        try:
            (wanted, handler), fields = _called(routes, method, path, body)
        except KeyError:
            return Reply('{"detail":"Not Found"}', 404)
        missing = [field for field in wanted if field not in fields]
        if missing:
            detail = [{"type": "missing", "loc": ["body", field]} for field in missing]
            return Reply(json.dumps({"detail": detail}), 422)
        try:
            return Reply(json.dumps(handler(**fields)))
        except Exception:
            return Reply("Internal Server Error", 500, "text/plain")

    return answer


def quart(routes: Routes) -> Answer:
    """A Quart server: nobody checks the fields, and errors are pages of HTML."""

    def answer(method: str, path: str, body: Any) -> Reply:
        if path == "/":
            return Reply("ok", 200, "text/html; charset=utf-8")
        try:
            (wanted, handler), fields = _called(routes, method, path, body)
        except KeyError:
            return Reply("<!doctype html>\n<title>404 Not Found</title>", 404, "text/html")
        try:
            return Reply(json.dumps(handler(**{field: fields[field] for field in wanted})))
        except Exception:
            return Reply(QUART_ERROR, 500, "text/html; charset=utf-8")

    return answer


def alfworld() -> Answer:
    """Take the apple out of the fridge within 50 steps. Exceptions are 200 with an error."""
    infos: dict[int, dict[str, Any]] = {}
    games: dict[int, int] = {}  # steps taken

    def guarded(handler: Callable[..., Any]) -> Callable[..., Any]:
        def call(**fields: Any) -> Any:
            try:
                return handler(**fields)
            except Exception as error:
                return {"error": str(error)}

        return call

    def check(id: int, is_reset: bool = False) -> None:
        if id not in infos:
            raise NameError(f"The id {id} is not valid.")
        if infos[id]["done"] and not is_reset:
            raise NameError(f"The task with environment {id} has finished.")

    def create() -> dict[str, Any]:
        infos[len(infos)] = {"done": False, "reward": 0, "deleted": False}
        return {"id": len(infos) - 1}

    def reset(id: int, game: int, world_type: str) -> dict[str, Any]:
        if world_type not in ("Text", "Embody", "Hybrid"):
            return {"error": "unknown world_type"}
        check(id, is_reset=True)
        if not -2620 <= game < 2620:
            raise IndexError("list index out of range")
        games[id] = 0
        start = {"observation": f"Game {game}.\nYour task is to: get an apple."}
        start["available_actions"] = ["go to fridge 1", "look"]
        infos[id] = {**start, "done": False, "reward": 0, "deleted": False}
        return {"id": id, **start, "task_type": "pick_and_place_simple/trial_7"}

    def step(id: int, action: str) -> dict[str, Any]:
        check(id)
        games[id] += 1
        won = action == "take apple 1 from fridge 1" and games[id] > 1
        seen = "You pick up the apple 1." if won else "Nothing happens."
        outcome = {
            "observation": "On the fridge 1 is an apple 1." if action.startswith("go to") else seen,
            "reward": float(won),
            "available_actions": ["take apple 1 from fridge 1", "look"],
            "done": won or games[id] >= 50,
        }
        infos[id].update(outcome)
        return outcome

    return fastapi(
        {
            "GET /": ((), lambda: "This is environment AlfWorld."),
            "POST /create": ((), guarded(create)),
            "POST /reset": (("id", "game", "world_type"), guarded(reset)),
            "POST /step": (("id", "action"), guarded(step)),
        }
    )


def searchqa() -> Answer:
    """The right answer is Paris. A wrong one does not end the episode."""
    live: dict[int, int] = {}
    created = iter(range(1000))

    def fetched(item: int) -> int:
        if not 0 <= item < 221328:
            raise ValueError(f"Item id {item} is out of range.")
        return item

    def create(id: int) -> int:
        number = next(created)
        live[number] = fetched(id)
        return number

    def reset(env_idx: int, id: int | None = None) -> str:
        live[env_idx], _ = fetched(id), live[env_idx]  # type: ignore[arg-type]
        return f"Reason first.\n\n Question: capital of France ({live[env_idx]})?"

    def step(env_idx: int, action: str) -> dict[str, Any]:
        live[env_idx]
        found = re.search(r"<(search|answer)>([^<]*)</\1>", action)
        kind = found[1] if found else None
        right = kind == "answer" and found[2].strip().lower() == "paris"  # type: ignore[index]
        texts = {
            "search": "<information>Doc 1(Title: Paris) a city</information>",
            "answer": "Well done." if right else "That is not it. Try again.",
            None: "Your action is invalid.",
        }
        return {"observation": texts[kind], "reward": float(right), "done": right, "info": None}

    def close(env_idx: int) -> bool:
        return live.pop(env_idx, None) is not None

    return fastapi(
        {
            "GET /": ((), lambda: "ok"),
            "POST /create": (("id",), create),
            "POST /reset": (("env_idx",), reset),
            "POST /step": (("env_idx", "action"), step),
            "POST /close": (("env_idx",), close),
        }
    )


class WebArena:
    """Stop with the answer 42. An executed action is "rewarded" with 1 until the end.

    `dead` browsers fail every step; without an `evaluator` a stop cannot be judged. Either way the
    step answers 200 with the words of the exception, and without info.
    """

    def __init__(self) -> None:
        self.live: dict[int, str] = {}
        self.ids = iter(range(1000))
        self.dead = False
        self.evaluator = True
        self.answer = quart(
            {
                "POST /create": ((), self._create),
                "POST /reset": (("env_idx", "seed", "idx"), self._reset),
                "GET /observation": (("env_idx",), self._observation),
                "POST /step": (("env_idx", "action"), self._step),
                "POST /close": (("env_idx",), self._close),
            }
        )

    def _create(self) -> dict[str, int]:
        number = next(self.ids)
        self.live[number] = ""
        return {"env_idx": number}

    def _reset(self, env_idx: int, seed: int, idx: int) -> dict[str, Any]:
        if not 0 <= idx < 812 or self.dead:
            return {"observation": "TimeoutError", "sites": "Error", "object": "Error"}
        self.live[env_idx] = f"objective {idx}"
        return {"observation": "tree", "sites": ["map"], "object": self.live[env_idx]}

    def _observation(self, env_idx: int) -> str:
        return f"OBSERVATION:\ntree\nOBJECTIVE: {self.live[env_idx]}\nPREVIOUS ACTION: None"

    def _step(self, env_idx: int, action: str) -> dict[str, Any]:
        try:
            reward, terminated = self._play(env_idx, action)
        except Exception as error:
            told: dict[str, Any] = {"observation": str(error), "reward": 0, "terminated": False}
            return {**told, "truncated": False, "info": None}
        told = {"observation": self._observation(env_idx), "reward": reward}
        told |= {"terminated": terminated, "truncated": False}
        return {**told, "info": {"page": {"url": "http://map"}, "fail_error": ""}}

    def _play(self, env_idx: int, text: str) -> tuple[float, bool]:
        found = re.search("```(.*?)```", text, re.DOTALL)
        if not found:
            raise ValueError(f"Cannot parse action from response {text}")
        action = found[1].strip()
        name = action.split()[0]  # an empty action is an IndexError
        if name == "type":
            {"a": 1}[action[-2]]  # a character without a key is a KeyError
        elif name not in ("stop", "scroll"):
            raise ValueError(f"Invalid action {action}")
        if self.dead:
            raise RuntimeError(f"browser {env_idx} is dead")
        if name != "stop":
            return 1.0, False
        if not self.evaluator:
            raise RuntimeError("the key of the judging model is not set")
        return float(action == "stop [42]"), True

    def _close(self, env_idx: int) -> dict[str, str]:
        self.live.pop(env_idx, None)
        return {"closed": "closed"}


class Tools:
    """The one program behind academia, todo and sheet: an action is the last line of the text.

    `use(env_idx, tool, parameters)` → (observation, reward so far); `begin(env_idx, item)` makes a
    session ready. Sessions cannot be closed.
    """

    def __init__(
        self,
        items: int,
        begin: Callable[[int, int], None],
        use: Callable[[int, str, dict[str, Any]], tuple[str, float]],
    ) -> None:
        self.items, self.begin, self.use = items, begin, use
        self.rewards: list[float] = []
        self.answer = fastapi(
            {
                "GET /": ((), lambda: "ok"),
                "POST /create": (("id",), self._create),
                "POST /reset": (("env_idx",), self._reset),
                "POST /step": (("env_idx", "action"), self._step),
            }
        )

    def _create(self, id: int) -> int:
        self.rewards.append(0.0)
        self._start(len(self.rewards) - 1, id)
        return len(self.rewards) - 1

    def _start(self, env_idx: int, item: int) -> None:
        if not -self.items <= item < self.items:
            raise IndexError("list index out of range")
        self.begin(env_idx, item)
        self.rewards[env_idx] = 0.0

    def _reset(self, env_idx: int, id: int) -> str:
        self._start(env_idx, id)
        return f"Now new trial starts.\nThe goal: {id}\nGive me one action."

    def _step(self, env_idx: int, action: str) -> dict[str, Any]:
        reward, done = self.rewards[env_idx], False
        found = re.search(r"(.*) with Action Input: (.*)\Z", action)
        if not found:
            return {"observation": "Format error", "reward": reward, "done": done}
        said, name = "ERROR | Exception(Parameters are not valid)", found[1]
        try:
            parameters = ast.literal_eval(found[2])
        except (ValueError, SyntaxError):
            parameters = None
        if parameters is not None:
            tool = name.removeprefix("Action: ")
            said, reward = self.use(env_idx, tool, parameters)
            done = "finish" in name.lower()
            if not done:
                self.rewards[env_idx] = reward = max(self.rewards[env_idx], reward)
        told = {"observation": f"Observation: {said}\nGive me one action."}
        return {**told, "reward": float(reward), "done": done}


def academia() -> Answer:
    """Three subgoals; the reward is the share of them that was seen so far."""
    seen: dict[int, set[str]] = {}
    subgoals = {"loadPaperNet", "paperNodeCheck", "finish"}

    def use(env_idx: int, tool: str, parameters: dict[str, Any]) -> tuple[str, float]:
        if tool not in subgoals:
            return f"ERROR | Invalid action: {tool}.", len(seen[env_idx]) / 3
        if tool == "paperNodeCheck" and "node" not in parameters:
            return "ERROR | KeyError('node')", len(seen[env_idx]) / 3
        seen[env_idx].add(tool)
        return f"{tool} is done.", len(seen[env_idx]) / 3

    return Tools(20, lambda env_idx, item: seen.update({env_idx: set()}), use).answer


class Todo:
    """One account for all sessions, which every create and reset clears and fills anew.

    The verdict at the end is right when the one task is done; until then reward is progress.
    With `down` set, the web service behind the tools fails in these words.
    """

    def __init__(self) -> None:
        self.open_tasks: set[str] = set()
        self.down: str | None = None
        self.answer = Tools(155, self._begin, self._use).answer

    def _begin(self, env_idx: int, item: int) -> None:
        if self.down:
            raise TypeError("string indices must be integers")
        self.open_tasks = {"7"}

    def _use(self, env_idx: int, tool: str, parameters: dict[str, Any]) -> tuple[str, float]:
        if tool == "finish":
            if self.down:
                raise ConnectionError(self.down)  # looks at the account outside any try
            return str(parameters["answer"]), float(not self.open_tasks)
        if self.down:
            return self.down, 0.5
        if tool == "complete_task":
            if parameters["task_id"] not in self.open_tasks:
                return f"There is no task {parameters['task_id']}.", 0.5
            self.open_tasks.remove(parameters["task_id"])
        return "[{'id': '7', 'content': 'water the plants'}]", 0.5


class Sheet:
    """A sheet of two cells, half of it right from the start: the reward is the share that is.

    The tools pass on exceptions of the web service as they print; `down` is such a text.
    """

    def __init__(self) -> None:
        self.cells: dict[int, dict[str, str]] = {}
        self.down: str | None = None
        begin = lambda env_idx, item: self.cells.update({env_idx: {}})
        self.answer = Tools(20, begin, self._use).answer

    def _use(self, env_idx: int, tool: str, parameters: dict[str, Any]) -> tuple[str, float]:
        cells = self.cells[env_idx]
        said = "<Worksheet 'Sheet1' id:0>" if tool == "open_sheet" else str(cells)
        if tool != "open_sheet" and not cells:
            return "Open a sheet first.", 0.0
        if self.down:
            return self.down, 0.0
        if tool == "open_sheet":
            cells.update({"A1": "sum", "A2": "0"})
        elif tool == "update_cell":
            cells[parameters["position"]] = str(parameters["value"])
        right = {"A1": "sum", "A2": "5"}
        return said, sum(cells[cell] == value for cell, value in right.items()) / 2

"""The table of AgentGym's environments: requests, responses and their meaning.

Fifteen servers share a protocol of create, reset, step and close but differ in nearly every field
name. The table holds these differences, one row per environment, and `client.Session` is driven by
a row. A row that needs a rule instead of a name, such as for the first observation, refers to one
of the small functions above the table.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from manus_jax.agentgym.rewards import RewardKind, RewardRule, any_reward
from manus_jax.registry import Registry

ActionStyle = Literal["line", "plain_line", "sql_block", "tool_call", "search_tags", "fenced"]
"""What a step sends, and whether client or server parses it.

line        the text after "Action:", extracted by the client
plain_line  the same, reduced to letters, digits, commas and spaces
sql_block   the content of the last ```sql block
tool_call   the model's full text; the server finds "Action: NAME with Action Input: {json}"
search_tags the model's full text; the server finds <search>…</search> or <answer>…</answer>
fenced      the model's full text; the server finds the action between triple backticks
"""

AVAILABLE_ACTIONS = "\nAVAILABLE ACTIONS: "
"""Precedes the list of actions in the first observation of AgentGym's clients."""

FirstView = Callable[[Any, Any], str]
"""(response to reset, response of the `look` route or None) → the first observation."""


def _observation(answer: Any, look: Any) -> str:
    return answer["observation"]


def _whole(answer: Any, look: Any) -> str:
    return answer


def _first_of_pair(answer: Any, look: Any) -> str:
    return answer[0]


def _looked(answer: Any, look: Any) -> str:
    return look


def _task_and_observation(answer: Any, look: Any) -> str:
    return "\n".join([answer["task_description"], answer["observation"]])


def _observation_and_actions(answer: Any, look: Any) -> str:
    actions = ",".join(answer["available_actions"])
    return "".join([answer["observation"], AVAILABLE_ACTIONS, actions])  # which must be text


def _observation_and_words(answer: Any, look: Any) -> str:
    # AgentGym's game has 40 words, which the agent needs; a longer list would fill the context.
    if len(look) > 200:
        return answer["observation"]
    return "\n".join([answer["observation"], f"The hidden word is one of: {', '.join(look)}"])


def _never(answer: Any) -> bool:
    return False


# Matches an exception of a tool's web client in an observation: its name, or the connection pool
# that it mentions. A rate-limited spreadsheet API returns 429; others return an HTML page. academia
# imports its graph library in several threads at once, which fails with a _DeadlockError.
_SERVICE_LOST = re.compile(
    r"Observation: (?:(?:ERROR \| )?(?:(?:Connection|SSL|Proxy|ChunkedEncoding|Transport|Refresh)"
    r"Error\(|(?:Connect|Read)Timeout\(|_DeadlockError\(|\w+\(.*ConnectionPool\(|"
    r"APIError\W+(?:(?:code|APIError)\W+)?(?:429|5\d\d)\b)|<(?:!DOCTYPE )?html)",
    re.IGNORECASE,
)


def _tool_lost_its_service(answer: Any) -> bool:
    # The tool servers return exceptions of their web clients as observations.
    text = answer["observation"] if isinstance(answer, dict) else answer
    return _SERVICE_LOST.match(text) is not None


# Errors of webarena's step that the agent can cause: an action that cannot be parsed, is empty, or
# types a character that is not on a keyboard (a KeyError, shown in quotes).
_UNREADABLE = re.compile("Cannot parse action|Invalid |list index out of range|'")


def _browser_failed(answer: Any) -> bool:
    # A reset reports every exception as a timeout. A step reports it as text, without info: the
    # browser died, or the result could not be evaluated.
    if "info" not in answer:
        return answer["observation"] == "TimeoutError"
    return answer["info"] is None and not _UNREADABLE.match(answer["observation"])


@dataclass(frozen=True)
class EnvironmentRow:
    """The protocol of the servers of one environment."""

    name: str
    id_field: Literal["id", "env_idx"]  # id: failures are 200 {"error"}; env_idx: they are 500
    port: int  # the default port of AgentGym's launcher
    item_field: str  # the field of reset that selects the task
    reward: RewardRule
    action: ActionStyle
    prefix: str = ""  # before every route: one server may serve several environments
    create_body: Mapping[str, Any] | None = None
    bare_id: bool = False  # create returns 7 instead of {"id": 7}
    reset_extra: Mapping[str, Any] = field(default_factory=dict)
    first_view: FirstView = _observation
    look: str | None = None  # a GET route called after reset, for first_view
    view_field: str = "observation"  # the field of a step's observation
    done_field: str = "done"
    done_markers: tuple[str, ...] = ()  # substrings that mean finished although `done` is false
    rejections: tuple[str, ...] = ()  # how an observation starts that refuses the action
    backend_failed: Callable[[Any], bool] = _never  # the response reports a failed backend
    closes: bool = False  # AgentGym's server has a close route
    reuse: bool = False  # the next episode resets this session instead of creating one
    recycles_ids: bool = False  # create may return an old id; else that means a restarted server
    lasting_effects: bool = False  # a reset does not undo all that actions change
    shares_ids: bool = False  # create may return a session of another client, who then plays in it
    items: range | None = None  # AgentGym's items; None: any number
    shares_items: bool = False  # an item is the same task on AgentGym's servers and on ours
    read_timeout: float = 60.0  # seconds per call
    sessions_per_server: int | None = None  # more concurrent sessions would interfere

    @property
    def sends_text(self) -> bool:
        """Whether the server parses the model's text itself, instead of getting an action."""
        return self.action in ("tool_call", "search_tags", "fenced")


_FINAL = RewardRule(RewardKind.FINAL)
_PROGRESS = RewardRule(RewardKind.MAX_SO_FAR)


def _tool(
    name: str, items: range, reward: RewardRule, sessions_per_server: int | None = None
) -> EnvironmentRow:
    # The five tool environments share one server program. Their sessions cannot be closed, and the
    # tools call web services that may be down.
    return EnvironmentRow(
        name, "env_idx", 8000, "id", reward, "tool_call", create_body={"id": 0}, bare_id=True,
        first_view=_whole, rejections=("Format error", "Observation: ERROR | "),
        backend_failed=_tool_lost_its_service, reuse=True, items=items,
        read_timeout=180, sessions_per_server=sessions_per_server,
    )  # fmt: skip


# fmt: off
# Name, id field, port, reset's item field, reward, action style; then specific fields.
# babyai: use `reward`; `score` grows with every invalid action after a slow success. A success
# worth 0.5 or less leaves `done` false, and past the step limit the value falls below 0.
# sqlgym: the ninth create returns an id that is in use; the pool rejects its own ids and waits. If
# the id belongs to another client, each step is followed by a look at the question that was scored.
# webshop has such a ring of 8000 ids, more than its clients create.
# webarena: actions change the web sites (posts, orders), which a reset does not restore.
# todo: create and reset clear and refill the server's single account, so concurrent episodes would
# undo each other's work.
# Servers without a close route keep their sessions forever, so sessions are reset and reused;
# sciworld starts a Java process per session, which is also worth keeping.
_ROWS = (
    EnvironmentRow("textcraft", "id", 36001, "data_idx", _FINAL, "plain_line",
                    create_body={"commands": None, "goal": None}, closes=True,
                    rejections=("Could not ",)),
    EnvironmentRow("babyai", "id", 36001, "data_idx",
                    RewardRule(RewardKind.FINAL, clip=True, success=any_reward), "plain_line",
                    done_markers=("The task is completed.",), closes=True, shares_items=True,
                    rejections=("The action is not recognized.",)),
    EnvironmentRow("sciworld", "id", 36001, "data_idx",
                    RewardRule(RewardKind.CUMULATIVE, field="score", low=-100, high=100), "line",
                    first_view=_task_and_observation, closes=True, reuse=True,
                    items=range(4639), shares_items=True, read_timeout=120,
                    rejections=("No known action matches that input.",)),
    EnvironmentRow("alfworld", "id", 36001, "game", _FINAL, "line",
                    reset_extra={"world_type": "Text"}, first_view=_observation_and_actions,
                    reuse=True, items=range(2620), read_timeout=180,
                    rejections=("Nothing happens.",)),
    EnvironmentRow("maze", "id", 36001, "game", RewardRule(RewardKind.FINAL, low=-1), "line",
                    prefix="/maze", reuse=True, items=range(25)),
    EnvironmentRow("wordle", "id", 36001, "seed", _FINAL, "line", prefix="/wordle",
                    look="filtered_vocab", first_view=_observation_and_words, reuse=True,
                    rejections=("invalid word",)),
    EnvironmentRow("sqlgym", "env_idx", 36002, "item_id", _FINAL, "sql_block", bare_id=True,
                    first_view=_first_of_pair, view_field="state", reuse=True, recycles_ids=True,
                    shares_ids=True, items=range(10962)),
    EnvironmentRow("webshop", "env_idx", 36001, "session_id", _FINAL, "line", bare_id=True,
                    first_view=_looked, look="observation", view_field="state", reuse=True,
                    recycles_ids=True),
    EnvironmentRow("searchqa", "env_idx", 36001, "id", _FINAL, "search_tags",
                    create_body={"id": 0}, bare_id=True, first_view=_whole, closes=True,
                    items=range(221328)),
    EnvironmentRow("webarena", "env_idx", 8000, "idx", _FINAL, "fenced",
                    reset_extra={"seed": 0}, first_view=_looked, look="observation",
                    done_field="terminated", backend_failed=_browser_failed, closes=True,
                    lasting_effects=True,
                    items=range(812), read_timeout=300),
    _tool("weather", range(343), _PROGRESS),
    _tool("movie", range(238), _PROGRESS),
    _tool("academia", range(20), _PROGRESS),
    _tool("sheet", range(20), _PROGRESS),
    _tool("todo", range(155), _FINAL, sessions_per_server=1),
)
# fmt: on

ENVIRONMENTS: Registry[EnvironmentRow] = Registry("environment")
for _row in _ROWS:
    ENVIRONMENTS.add(_row)


def environment(name: str) -> EnvironmentRow:
    """The row of an environment; an unknown name is an error that lists the known ones."""
    return ENVIRONMENTS[name]

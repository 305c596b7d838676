"""The one table of AgentGym's environments: what is sent, what comes back, what it means.

Fifteen servers share a protocol of create, reset, step and close and differ in nearly every field
name. The one idea: the differences are data. `client.Session` is a single piece of code that reads
a row; a new environment is a new row. Where a row needs a rule rather than a name (the first
observation), it names one of the small functions above the table.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from manus_jax.agentgym.rewards import Meaning, RewardRule, any_reward
from manus_jax.registry import Registry

ActionStyle = Literal["line", "plain_line", "sql_block", "tool_call", "search_tags", "fenced"]
"""What a step sends, and who parses it.

line        the text after "Action:"; the agent's parser takes it out
plain_line  the same, with nothing but letters, digits, commas and spaces
sql_block   the content of the last ```sql block
tool_call   the model's text as it is; the server finds "Action: NAME with Action Input: {json}"
search_tags the model's text as it is; the server finds <search>…</search> or <answer>…</answer>
fenced      the model's text as it is; the server finds the action between triple backticks
"""

FirstView = Callable[[Any, Any], str]
"""(answer to reset, answer of the `look` route or None) → the first observation."""


def _observation(answer: Any, look: Any) -> str:
    return answer["observation"]


def _whole(answer: Any, look: Any) -> str:
    return answer


def _first_of_pair(answer: Any, look: Any) -> str:
    return answer[0]


def _looked(answer: Any, look: Any) -> str:
    return look


def _task_and_observation(answer: Any, look: Any) -> str:
    return f"{answer['task_description']}\n{answer['observation']}"


def _observation_and_actions(answer: Any, look: Any) -> str:
    return f"{answer['observation']}\nAVAILABLE ACTIONS: {','.join(answer['available_actions'])}"


def _observation_and_words(answer: Any, look: Any) -> str:
    # AgentGym's game has 40 words, which the agent has to know; a thousand would fill its context.
    if len(look) > 200:
        return answer["observation"]
    return f"{answer['observation']}\nThe hidden word is one of: {', '.join(look)}"


def _never(answer: Any) -> bool:
    return False


# What is left of an exception of the tools' web clients: its name, or the pool it speaks of. A
# spreadsheet that is asked too often refuses (429); an API may answer with a page.
_SERVICE_LOST = re.compile(
    r"Observation: (?:(?:ERROR \| )?(?:(?:Connection|SSL|Proxy|ChunkedEncoding|Transport|Refresh)"
    r"Error\(|(?:Connect|Read)Timeout\(|\w+\(.*ConnectionPool\(|"
    r"APIError\W+(?:(?:code|APIError)\W+)?(?:429|5\d\d)\b)|<(?:!DOCTYPE )?html)",
    re.IGNORECASE,
)


def _tool_lost_its_service(answer: Any) -> bool:
    # The tools pass on what their web service's client raised, as an observation.
    text = answer["observation"] if isinstance(answer, dict) else answer
    return _SERVICE_LOST.match(text) is not None


# What the agent itself can make webarena's step raise: an action that cannot be read, is empty, or
# types a character that is on no keyboard (a KeyError, shown in quotes).
_UNREADABLE = re.compile("Cannot parse action|Invalid |list index out of range|'")


def _browser_failed(answer: Any) -> bool:
    # A reset tells of every exception as a timeout. A step tells of it in its own words, without
    # info: a browser that died, and an evaluation of the result that did not come about.
    if "info" not in answer:
        return answer["observation"] == "TimeoutError"
    return answer["info"] is None and not _UNREADABLE.match(answer["observation"])


@dataclass(frozen=True)
class EnvironmentRow:
    """One row: how to speak with the servers of one environment."""

    name: str
    id_field: Literal["id", "env_idx"]  # id: failures are 200 {"error"}; env_idx: they are 500
    port: int  # where AgentGym's own launcher puts the server
    item_field: str  # the field of reset that chooses the task
    reward: RewardRule
    action: ActionStyle
    prefix: str = ""  # one server may serve several environments
    create_body: Mapping[str, Any] | None = None
    bare_id: bool = False  # create answers 7 rather than {"id": 7}
    reset_extra: Mapping[str, Any] = field(default_factory=dict)
    first_view: FirstView = _observation
    look: str | None = None  # a GET route asked after reset, for first_view
    view_field: str = "observation"  # where a step's observation is
    done_field: str = "done"
    done_markers: tuple[str, ...] = ()  # texts that end an episode which done forgets to end
    backend_failed: Callable[[Any], bool] = _never  # an answer that tells of a failure behind it
    closes: bool = False  # AgentGym's server has a close route
    reuse: bool = False  # the next episode resets this session instead of making a new one
    items: range | None = None  # AgentGym's items; None: any number
    read_timeout: float = 60.0  # seconds a call may take
    sessions_per_server: int | None = None  # more at once would disturb each other

    @property
    def sends_text(self) -> bool:
        """The server parses the model's text itself; otherwise it is sent a parsed action."""
        return self.action in ("tool_call", "search_tags", "fenced")


_VERDICT = RewardRule(Meaning.FINAL)
_PROGRESS = RewardRule(Meaning.BEST)


def _tool(
    name: str, items: range, reward: RewardRule, sessions_per_server: int | None = None
) -> EnvironmentRow:
    # The five tool environments are one server program with different tools. Their sessions cannot
    # be closed, and the tools call web services that may be down.
    return EnvironmentRow(
        name, "env_idx", 8000, "id", reward, "tool_call", create_body={"id": 0}, bare_id=True,
        first_view=_whole, backend_failed=_tool_lost_its_service, reuse=True, items=items,
        read_timeout=180, sessions_per_server=sessions_per_server,
    )  # fmt: skip


# fmt: off
# Name, id field, port, reset's item field, reward, action; then what is peculiar to it.
# babyai: `reward`, not `score`, which grows with every invalid action after a slow success; a
# success worth 0.5 or less leaves done false, and past the step limit the value falls below 0.
# sqlgym: the ninth create hands out an id that is in use; the pool refuses it and waits.
# todo: create and reset clear the one account behind the server and fill it anew, so two episodes
# at once would undo each other's work.
# A server without a close route keeps its sessions for ever, so they are reset and used again;
# sciworld starts a Java process per session, which is worth keeping too.
_ROWS = (
    EnvironmentRow("textcraft", "id", 36001, "data_idx", _VERDICT, "plain_line",
                    create_body={"commands": None, "goal": None}, closes=True),
    EnvironmentRow("babyai", "id", 36001, "data_idx",
                    RewardRule(Meaning.FINAL, clip=True, success=any_reward), "plain_line",
                    done_markers=("The task is completed.",), closes=True),
    EnvironmentRow("sciworld", "id", 36001, "data_idx",
                    RewardRule(Meaning.CUMULATIVE, field="score", low=-100, high=100), "line",
                    first_view=_task_and_observation, closes=True, reuse=True,
                    items=range(4639), read_timeout=120),
    EnvironmentRow("alfworld", "id", 36001, "game", _VERDICT, "line",
                    reset_extra={"world_type": "Text"}, first_view=_observation_and_actions,
                    reuse=True, items=range(2620), read_timeout=180),
    EnvironmentRow("maze", "id", 36001, "game", RewardRule(Meaning.FINAL, low=-1), "line",
                    prefix="/maze", reuse=True, items=range(25)),
    EnvironmentRow("wordle", "id", 36001, "seed", _VERDICT, "line", prefix="/wordle",
                    look="filtered_vocab", first_view=_observation_and_words, reuse=True),
    EnvironmentRow("sqlgym", "env_idx", 36002, "item_id", _VERDICT, "sql_block", bare_id=True,
                    first_view=_first_of_pair, view_field="state", reuse=True,
                    items=range(10962)),
    EnvironmentRow("webshop", "env_idx", 36001, "session_id", _VERDICT, "line", bare_id=True,
                    first_view=_looked, look="observation", view_field="state", reuse=True),
    EnvironmentRow("searchqa", "env_idx", 36001, "id", _VERDICT, "search_tags",
                    create_body={"id": 0}, bare_id=True, first_view=_whole, closes=True,
                    items=range(221328)),
    EnvironmentRow("webarena", "env_idx", 8000, "idx", _VERDICT, "fenced",
                    reset_extra={"seed": 0}, first_view=_looked, look="observation",
                    done_field="terminated", backend_failed=_browser_failed, closes=True,
                    items=range(812), read_timeout=300),
    _tool("weather", range(343), _PROGRESS),
    _tool("movie", range(238), _PROGRESS),
    _tool("academia", range(20), _PROGRESS),
    _tool("sheet", range(20), _PROGRESS),
    _tool("todo", range(155), _VERDICT, sessions_per_server=1),
)
# fmt: on

ENVIRONMENTS: Registry[EnvironmentRow] = Registry("environment")
for _row in _ROWS:
    ENVIRONMENTS.add(_row)


def environment(name: str) -> EnvironmentRow:
    """The row of an environment; an unknown name is an error that lists the known ones."""
    return ENVIRONMENTS[name]

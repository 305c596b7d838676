"""The weather assistant as a game.

As in AgentGym's tool servers, a step gets the agent's whole text and executes the
last `Action: NAME with Action Input: {json}` in it. Only `finish` ends the episode; its answer is
graded.
"""

import ast
import json
import re
from typing import Any

from envs.game import GameError, Step
from envs.weather.tasks import Question, grade, question
from envs.weather.tools import FINISH, BadCall, call

_ACTION = re.compile(r"\s*(\w+)\s+with\s+Action\s+Input:(.*)\Z", re.DOTALL | re.IGNORECASE)
FORMAT_ERROR = (
    'Format error, please response in the format of  "Action: [your action] with Action Input:'
    " [your action input]"
)


class Weather:
    """The question of one session."""

    def __init__(self) -> None:
        self._question: Question | None = None
        self._observation = ""
        self._done = False

    def reset(self, item: int) -> str:
        self._question = question(item)
        self._done = False
        self._observation = (
            "Now new trial starts.\nYou should perform actions to accomplish the goal:"
            f" {self._question.text}\nGive me one action."
        )
        return self._observation

    def step(self, action: str) -> Step:
        asked = self._asked()
        if self._done:
            raise GameError("The episode has ended: reset before the next step.")
        parsed = parse(action)
        if parsed is None:
            self._observation = FORMAT_ERROR
            return Step(self._observation, 0.0, False)
        name, arguments = parsed
        reward = 0.0
        if name == FINISH and _is_answer(arguments):
            self._done = True
            reward = grade(asked.answer, arguments["answer"])
            said = str(arguments["answer"])
        else:
            said = _use(asked, name, arguments)
        self._observation = f"Observation: {said}\nGive me one action."
        return Step(self._observation, reward, self._done)

    def observation(self) -> str:
        self._asked()
        return self._observation

    def close(self) -> None:
        self._question = None

    def _asked(self) -> Question:
        if self._question is None:
            raise GameError("The game has not been reset: call reset with an id first.")
        return self._question


def parse(text: str) -> tuple[str, dict[str, Any]] | None:
    """(tool, arguments) of the last action in the agent's text, or None."""
    found = _ACTION.match(text.rpartition("Action:")[2])
    if found is None:
        return None
    given = found.group(2).strip() or "{}"
    try:
        arguments = json.loads(given)
    except (ValueError, RecursionError):
        try:
            arguments = ast.literal_eval(given)  # what AgentGym's server reads
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return None
    return (found.group(1), arguments) if isinstance(arguments, dict) else None


def _is_answer(arguments: dict[str, Any]) -> bool:
    """Whether these are valid arguments of `finish`."""
    answer = arguments.get("answer")
    parts = answer if isinstance(answer, list) else [answer]
    return set(arguments) == {"answer"} and all(isinstance(p, str | int | float) for p in parts)


def _use(asked: Question, name: str, arguments: dict[str, Any]) -> str:
    if name == FINISH:
        return "Error: finish takes answer, a string, a number or a list of them"
    try:
        return str(call(asked.situation, name, arguments))
    except BadCall as error:
        return f"Error: {error}"

"""The opening of an episode: what the game is, how to answer, and the first observation.

The one idea: the form of an answer that the model is told is the text of the very format that will
parse it, and examples are written in that form; a dataset's own prompt that does not show the form
gets it added. So no model is ever asked for one form and read in another, or left without any.
"""

import dataclasses
from typing import Literal, get_args

from manus_jax.agentgym.prompts import PROMPTS, EnvironmentPrompt
from manus_jax.data.chat import Message
from manus_jax.data.tasks import Task
from manus_jax.rollout.action_formats import ActionFormat

PromptSource = Literal["environment", "dataset", "observation"]

ACKNOWLEDGEMENT = "OK. I will follow these instructions and answer in this format."
LEFT_OUT = "[{turns} earlier turns are left out here. The newest observation before the next turn:]"
CUT = "[... {characters} characters are left out here ...]"


@dataclasses.dataclass(frozen=True)
class PromptSettings:
    """How an episode opens.

    `source`: the environment's instruction ("environment"), the dataset's own prompt where a row
    has one ("dataset"), or nothing but the first observation ("observation"), for a model that was
    fine-tuned on the game and needs no telling. `layout`: instruction and first observation in one
    user turn ("user"); the instruction as the system's turn ("system"); or as a user turn that the
    assistant acknowledges before the observation ("acknowledged"), as in AgentGym's conversations.
    """

    source: PromptSource = "environment"
    layout: Literal["user", "system", "acknowledged"] = "user"
    examples: int = 1  # of the environment's examples, at most

    def __post_init__(self) -> None:
        if self.source not in get_args(PromptSource):
            known = ", ".join(get_args(PromptSource))
            raise ValueError(f"prompt source {self.source!r}; there are {known}")
        if self.layout not in ("user", "system", "acknowledged"):
            raise ValueError(f"prompt layout {self.layout!r}; there are user, system, acknowledged")
        if self.examples < 0:
            raise ValueError(f"prompt examples = {self.examples}: 0 or more")


@dataclasses.dataclass(frozen=True)
class Opening:
    """The messages before the first observation, and how the observation joins them."""

    before: tuple[Message, ...]
    joined: bool  # the observation continues the last of them, which is the user's

    def messages(self, observation: str) -> tuple[Message, ...]:
        """The opening turns, the last of which is the user's and ends with the observation."""
        if not self.joined:
            return (*self.before, Message("user", observation))
        *others, last = self.before
        return (*others, Message("user", f"{last.content}\n\n{observation}"))


def opening(task: Task, action_format: ActionFormat, settings: PromptSettings) -> Opening:
    """How the episode of a task opens."""
    if settings.source == "observation":
        return Opening((), joined=False)
    if settings.source == "dataset" and task.prompt:
        return _from_dataset(task.prompt, action_format, settings.layout)
    assert task.env is not None
    text = instruction(PROMPTS[task.env], action_format, settings.examples)
    return _laid_out((), text, settings.layout)


def instruction(prompt: EnvironmentPrompt, action_format: ActionFormat, examples: int) -> str:
    """The game, its actions, the form of an answer, and examples in that form."""
    actions = "\n".join(f"- {action}" for action in prompt.actions)
    parts = [prompt.instruction, f"The actions are:\n{actions}", action_format.instruction]
    for example in prompt.examples[:examples]:
        answer = action_format.render(example.thought, example.action)
        parts.append(
            f"For example, this observation:\n\n{example.observation}\n\n"
            f"could be answered with:\n\n{answer}"
        )
    return "\n\n".join(parts)


def _from_dataset(prompt: tuple[Message, ...], action_format: ActionFormat, layout: str) -> Opening:
    if not any(action_format.marker in message.content for message in prompt):
        first = prompt[0]
        told = f"{first.content}\n\n{action_format.instruction}"
        prompt = (dataclasses.replace(first, content=told), *prompt[1:])
    *others, last = prompt
    if last.role != "user":
        return Opening(prompt, joined=False)
    return _laid_out(tuple(others), last.content, layout)


def _laid_out(before: tuple[Message, ...], text: str, layout: str) -> Opening:
    if layout == "user" or (layout == "system" and before):
        return Opening((*before, Message("user", text)), joined=True)
    if layout == "system":
        return Opening((Message("system", text),), joined=False)
    acknowledged = (Message("user", text), Message("assistant", ACKNOWLEDGEMENT))
    return Opening((*before, *acknowledged), joined=False)


def rejoined(first_observation: str, left_out: int, newest: str) -> str:
    """The first observation of an opening after which the oldest turns are left out."""
    return f"{first_observation}\n\n{LEFT_OUT.format(turns=left_out)}\n\n{newest}"


def cut_middle(text: str, limit: int) -> str:
    """At most about `limit` characters of a text: its beginning and end, and what is missing."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    tail = limit - head
    note = CUT.format(characters=len(text) - limit)
    return f"{text[:head]}\n{note}\n{text[len(text) - tail :]}"

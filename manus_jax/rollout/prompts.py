"""The opening of an episode: the task, the answer format, and the first observation.

The instruction and the example turns come from the same `ActionFormat` that parses the answers. If
a dataset's prompt does not show the format, the instruction is appended, so that the prompt and the
parser always agree.
"""

import dataclasses

from manus_jax.agentgym.prompts import PROMPTS, EnvironmentPrompt
from manus_jax.config.settings import PromptLayout, RolloutSettings
from manus_jax.data.chat import Message
from manus_jax.data.tasks import Task
from manus_jax.rollout.action_formats import ActionFormat

ACKNOWLEDGEMENT = "OK. I will follow these instructions and answer in this format."
LEFT_OUT = "[{turns} earlier turns are left out here. The newest observation before the next turn:]"
CUT = "[... {characters} characters are left out here ...]"


@dataclasses.dataclass(frozen=True)
class Opening:
    """The messages before the first observation, and how the observation is added."""

    before: tuple[Message, ...]
    joined: bool  # the observation is appended to the last message, which is a user message

    def messages(self, observation: str) -> tuple[Message, ...]:
        """The opening messages; the last one is a user message that ends with the observation."""
        if not self.joined:
            return (*self.before, Message("user", observation))
        *others, last = self.before
        return (*others, Message("user", f"{last.content}\n\n{observation}"))


def opening(task: Task, action_format: ActionFormat, settings: RolloutSettings) -> Opening:
    """The opening of an episode of the task, according to the settings `prompt_*`."""
    if settings.prompt_source == "observation":
        return Opening((), joined=False)
    if settings.prompt_source == "dataset" and task.prompt:
        return _from_dataset(task.prompt, action_format, settings.prompt_layout)
    assert task.env is not None
    text = instruction(PROMPTS[task.env], action_format, settings.prompt_examples)
    return _laid_out((), text, settings.prompt_layout)


def instruction(prompt: EnvironmentPrompt, action_format: ActionFormat, examples: int) -> str:
    """The task, its actions, the answer format, and examples in that format."""
    actions = "\n".join(f"- {action}" for action in prompt.actions)
    parts = [prompt.instruction, f"The actions are:\n{actions}", action_format.instruction]
    for example in prompt.examples[:examples]:
        answer = action_format.render(example.thought, example.action)
        parts.append(
            f"For example, this observation:\n\n{example.observation}\n\n"
            f"could be answered with:\n\n{answer}"
        )
    return "\n\n".join(parts)


def _from_dataset(
    prompt: tuple[Message, ...], action_format: ActionFormat, layout: PromptLayout
) -> Opening:
    if not any(action_format.marker in message.content for message in prompt):
        first = prompt[0]
        content = f"{first.content}\n\n{action_format.instruction}"
        prompt = (dataclasses.replace(first, content=content), *prompt[1:])
    *others, last = prompt
    if last.role != "user":
        return Opening(prompt, joined=False)
    return _laid_out(tuple(others), last.content, layout)


def _laid_out(before: tuple[Message, ...], text: str, layout: PromptLayout) -> Opening:
    if layout == "user" or (layout == "system" and before):
        return Opening((*before, Message("user", text)), joined=True)
    if layout == "system":
        return Opening((Message("system", text),), joined=False)
    acknowledged = (Message("user", text), Message("assistant", ACKNOWLEDGEMENT))
    return Opening((*before, *acknowledged), joined=False)


def rejoined(first_observation: str, left_out: int, newest: str) -> str:
    """The first observation of a new opening that omits the oldest turns."""
    return f"{first_observation}\n\n{LEFT_OUT.format(turns=left_out)}\n\n{newest}"


def cut_middle(text: str, limit: int) -> str:
    """About `limit` characters of a text: its start, a note on the omitted part, and its end."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    tail = limit - head
    note = CUT.format(characters=len(text) - limit)
    return f"{text[:head]}\n{note}\n{text[len(text) - tail :]}"

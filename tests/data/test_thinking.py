"""Thoughts in earlier turns are kept, removed as the template does, or switched off."""

import datetime
from typing import Any

import pytest
from chat_templates import LLAMA, OPENING, QWEN3, QWEN25, tokenizer_with

from manus_jax.config.settings import ChatSettings
from manus_jax.data.chat import CHATML, ChatStream, ChatTemplateError, Message
from manus_jax.data.chat_template import template_arguments, template_variables

HEAD = "<|im_start|>assistant\n"


def user(text: str) -> Message:
    return Message("user", text)


def agent(text: str, train: bool = True) -> Message:
    return Message("assistant", text, train)


def asked(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def thought(about: str, answer: str) -> str:
    return f"<think>\n{about}\n</think>\n\n{answer}"


THOUGHTFUL = [
    user("a"),
    agent(thought("first", "one")),
    user("b"),
    agent(thought("second", "two")),
    user("c"),
    agent(thought("third", "three")),
]
PLAIN = [user("a"), agent("one"), user("b"), agent("two")]


def sequences(tokenizer: Any, messages: list[Message], **chat: Any) -> list[tuple[str, str]]:
    """All text and the trained text of each sequence."""
    encoded = ChatStream(tokenizer, ChatSettings(**chat)).encode(messages)
    assert all(e.loss_mask[list(e.turn_ends)].any() for e in encoded)
    return [
        (tokenizer.decode(e.input_ids), tokenizer.decode(e.input_ids[e.loss_mask])) for e in encoded
    ]


def test_kept_thoughts_make_one_sequence() -> None:
    [(text, trained)] = sequences(tokenizer_with(QWEN3), THOUGHTFUL)
    turns = [thought("first", "one"), thought("second", "two"), thought("third", "three")]
    assert trained == "".join(f"{turn}<|im_end|>" for turn in turns)
    expected = "\n".join(
        f"{asked(seen)}{HEAD}{turn}<|im_end|>" for seen, turn in zip("abc", turns, strict=True)
    )
    assert text == expected


def test_stripped_thoughts_make_a_sequence_per_turn_and_every_turn_is_trained_once() -> None:
    tokenizer = tokenizer_with(QWEN3)
    made = sequences(tokenizer, THOUGHTFUL, thinking="strip")
    assert [trained for _, trained in made] == [
        f"{thought(about, answer)}<|im_end|>"
        for about, answer in (("first", "one"), ("second", "two"), ("third", "three"))
    ]
    assert made[2][0] == (
        f"{asked('a')}{HEAD}one<|im_end|>\n{asked('b')}{HEAD}two<|im_end|>\n{asked('c')}{HEAD}"
        f"{thought('third', 'three')}<|im_end|>"
    )
    chat = [{"role": m.role, "content": m.content} for m in THOUGHTFUL]
    for number, (text, _) in enumerate(made):
        shown = chat[: 2 * number + 2]
        assert f"{text}\n" == tokenizer.apply_chat_template(shown, tokenize=False)


def test_conversations_without_thoughts_are_encoded_as_qwen3_writes_each_turn() -> None:
    """Its template adds an empty thought to the last turn only."""
    tokenizer = tokenizer_with(QWEN3)
    [(_, trained)] = sequences(tokenizer, PLAIN)
    assert trained == "".join(f"<think>\n\n</think>\n\n{a}<|im_end|>" for a in ("one", "two"))
    first, second = sequences(tokenizer, PLAIN, thinking="strip")
    assert first[1] == "<think>\n\n</think>\n\none<|im_end|>"
    assert second[0].startswith(f"{asked('a')}{HEAD}one<|im_end|>\n")
    for chat in ({"thinking": "off"}, {"template_kwargs": {"enable_thinking": False}}):
        [(text, trained)] = sequences(tokenizer, PLAIN, **chat)
        assert trained == "one<|im_end|>two<|im_end|>"
        assert text.count("<think>\n\n</think>\n\n") == 2


def test_switched_off_thinking_leaves_thoughts_of_the_data_out() -> None:
    [(_, trained)] = sequences(tokenizer_with(QWEN3), THOUGHTFUL, thinking="off")
    assert trained == "one<|im_end|>two<|im_end|>three<|im_end|>"


def test_a_fork_with_untrained_turns_only_is_left_out() -> None:
    messages = [*THOUGHTFUL[:2], user("b"), agent("two", train=False), user("c"), agent("three")]
    made = sequences(tokenizer_with(QWEN3), messages, thinking="strip")
    assert [trained for _, trained in made] == [
        "<think>\nfirst\n</think>\n\none<|im_end|>",
        "<think>\n\n</think>\n\nthree<|im_end|>",
    ]


@pytest.mark.parametrize("thinking", ["keep", "strip"])
def test_a_template_that_rewrites_nothing_never_forks(thinking: str) -> None:
    for template in (QWEN25, CHATML, LLAMA):
        assert len(sequences(tokenizer_with(template), THOUGHTFUL, thinking=thinking)) == 1


def test_following_the_template_forks_only_for_thoughts() -> None:
    tokenizer = tokenizer_with(QWEN3)
    stream = ChatStream(tokenizer, ChatSettings(thinking="strip"))
    said = thought("hm", "one")
    for turn, forked in ((said, True), (" one ", False), ("<think>\nnever closed", False)):
        sampled = tokenizer(f"{turn}<|im_end|>", add_special_tokens=False)["input_ids"]
        ids, forks = stream.follow([user("a"), agent(turn)], sampled, [user("b")])
        assert forks == forked
        more = f"\n{asked('b')}{HEAD}"
        whole = f"{asked('a')}{HEAD}one<|im_end|>{more}"
        assert tokenizer.decode(ids) == (whole if forked else more)
    # Qwen3 keeps thoughts until the user's next question, and replies of tools are none.
    sampled = tokenizer(f"{said}<|im_end|>", add_special_tokens=False)["input_ids"]
    reply = Message("tool", "b")
    ids, forks = stream.follow([user("a"), agent(said)], sampled, [reply])
    assert not forks and "<tool_response>\nb\n</tool_response>" in tokenizer.decode(ids)


# arguments


def test_arguments_are_the_variables_that_a_template_reads() -> None:
    assert template_variables(QWEN3) == {
        *("messages", "tools", "add_generation_prompt", "enable_thinking")
    }
    assert template_variables(QWEN25) == {"messages", "tools", "add_generation_prompt"}
    assert "date_string" in template_variables(LLAMA)
    assert template_variables({"default": CHATML, "tool_use": "{{ tools }}{{ style }}"}) == {
        *("messages", "add_generation_prompt", "tools", "style")
    }
    marked = "{% generation %}{{ x }}{% endgeneration %}{% for a in b %}{% break %}{% endfor %}"
    assert template_variables(marked) == {"x", "b"}


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (QWEN3, {"template_kwargs": {"thinking": False}}, "no argument 'thinking'; it has enable_"),
        (QWEN25, {"template_kwargs": {"enable_thinking": False}}, "'enable_thinking'; it has none"),
        (QWEN3, {"template_kwargs": {"tools": []}}, "'tools' is set by the program"),
        (QWEN25, {"thinking": "off"}, "no argument that turns thinking off"),
        (
            QWEN3,
            {"thinking": "off", "template_kwargs": {"enable_thinking": True}},
            "contradicts chat.template_kwargs",
        ),
    ],
)
def test_an_argument_that_the_template_does_not_support_is_an_error(
    template: str, chat: dict[str, Any], message: str
) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        template_arguments(template, ChatSettings(**chat))
    with pytest.raises(ChatTemplateError, match=message):
        ChatStream(tokenizer_with(template), ChatSettings(**chat))


def test_arguments_reach_every_rendering() -> None:
    tokenizer = tokenizer_with(QWEN3)
    stream = ChatStream(tokenizer, ChatSettings(template_kwargs={"enable_thinking": False}))
    for ids in (stream.start([user("a")]), stream.extend([stream.stop_id], [user("b")])):
        assert tokenizer.decode(ids).endswith(f"{HEAD}<think>\n\n</think>\n\n")


def test_the_current_date_is_a_fixed_one() -> None:
    tokenizer = tokenizer_with(LLAMA)
    today = datetime.date.today().strftime("%d %b %Y")
    assert today in tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False
    )
    shown = tokenizer.decode(ChatStream(tokenizer).start([user("a")]))
    assert "Today Date: 26 Jul 2024" in shown and today not in shown
    given = ChatSettings(template_kwargs={"date_string": "1 Jan 2025"})
    assert "Today Date: 1 Jan 2025" in tokenizer.decode(
        ChatStream(tokenizer, given).start([user("a")])
    )


def test_a_template_may_open_the_thought() -> None:
    assert ChatStream(tokenizer_with(OPENING)).opens_thought
    assert not ChatStream(tokenizer_with(QWEN3)).opens_thought

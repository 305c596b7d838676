"""Templates without a system role, such as Gemma 3's.

System text goes into the first user turn, and turns must alternate.
"""

import pytest
from transformers import PreTrainedTokenizerFast

from manus_jax.data.chat import ChatStream, ChatTemplateError, Message, train_tokenizer

GEMMA = (
    "{{ bos_token }}{% set first = namespace(text='') %}"
    "{% if messages[0].role == 'system' %}{% set first.text = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{{ (first.text if loop.first else '') + message.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
RULES, SEEN = Message("system", "Find the ball."), Message("user", "You see a door.")
SAID, NEXT = Message("assistant", "Action: open", True), Message("user", "It is open.")


@pytest.fixture(scope="module")
def tokenizer():
    trained = train_tokenizer(["you see a door"], 300)
    special = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained.backend_tokenizer, bos_token="<bos>", eos_token="<end_of_turn>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = GEMMA
    return tokenizer


def test_system_text_is_in_the_first_user_turn_and_later_turns_are_appended(tokenizer):
    stream = ChatStream(tokenizer)
    start = stream.start([RULES, SEEN])
    assert tokenizer.decode(start) == (
        "<bos><start_of_turn>user\nFind the ball.\n\nYou see a door.<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    sampled = [*tokenizer("Action: open", add_special_tokens=False)["input_ids"], stream.stop_id]
    assert tokenizer.decode(stream.extend(sampled, [NEXT])) == (
        "\n<start_of_turn>user\nIt is open.<end_of_turn>\n<start_of_turn>model\n"
    )


def test_supervised_data_with_a_system_message_is_encoded(tokenizer):
    [encoded] = ChatStream(tokenizer).encode([RULES, SEEN, SAID])
    trained = encoded.input_ids[encoded.loss_mask]
    assert tokenizer.decode(trained) == "Action: open<end_of_turn>"


def test_turns_that_do_not_alternate_are_refused_with_the_templates_message(tokenizer):
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatStream(tokenizer).start([SEEN, SEEN])

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from manus_jax.data.chat import (
    ChatStream,
    ChatTemplateError,
    ConversationError,
    Message,
    message_from_record,
    train_tokenizer,
)
from manus_jax.models.loading import open_tokenizer

TEXTS = [
    "Thought:\nI should check the inventory first.\n\nAction:\ninventory",
    "Instruction:\nInventory: You are not carrying anything.\n\nGoal: craft oak planks.",
    "You are given few useful crafting recipes. Got 4 stone\n\n\ncraft 4 stone bricks",
] * 3

QWEN25 = (
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if not (loop.first and m['role'] == 'system') %}"
    "{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] + '<|end_header_id|>"
    "\n\n' + m['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
# Writes a think block into the last turn only, and drops it once another turn follows.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A space before the end-of-turn token, and nothing that opens the assistant's turn.
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '<|startoftext|>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def byte_level(template, special, eos, bos=None):
    """A byte-level BPE tokenizer with its own special tokens, as a model would bring it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module")
def chatml():
    return byte_level(QWEN25, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>")


@pytest.fixture(scope="module")
def llama3():
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return byte_level(LLAMA3, special, "<|eot_id|>", "<|begin_of_text|>")


@pytest.fixture(scope="module")
def thinking():
    return byte_level(THINKING, ["<|im_start|>", "<|im_end|>"], "<|im_end|>")


def user(text):
    return Message("user", text)


def agent(text, train=True):
    return Message("assistant", text, train)


EPISODE = [
    user("You are given few useful crafting recipes."),
    agent("OK. I'll follow your instructions.", train=False),
    user("Goal: craft oak planks."),
    agent("Thought:\nLook.\n\nAction:\ninventory"),
    user("Inventory: You are not carrying anything."),
    agent("Action:\nget 1 oak logs"),
]


# records


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"from": "human", "value": "hi", "loss": None}, Message("user", "hi", False)),
        ({"from": "env", "value": "obs"}, Message("user", "obs", False)),
        ({"from": "system", "value": "s"}, Message("system", "s", False)),
        ({"from": "gpt", "value": "a", "loss": True}, Message("assistant", "a", True)),
        ({"from": "gpt", "value": "a", "loss": False}, Message("assistant", "a", False)),
        ({"from": "gpt", "value": "a", "loss": None}, Message("assistant", "a", True)),
        ({"from": "gpt", "value": "a"}, Message("assistant", "a", True)),
        ({"role": "assistant", "content": "a"}, Message("assistant", "a", True)),
        ({"role": "user", "content": "u"}, Message("user", "u", False)),
    ],
)
def test_records_of_both_formats_become_messages(record, message):
    assert message_from_record(record) == message


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({"from": "robot", "value": "x"}, "unknown role 'robot' under 'from' .known: human,"),
        ({"from": "gpt", "value": None}, "needs text under 'value', got None"),
        ({"role": "user"}, "needs text under 'content', got None"),
        ({"role": 3, "content": "x"}, "unknown role 3 under 'role'"),
        ({"text": "x"}, r"needs a role under 'role' or 'from'; its keys are \['text'\]"),
        ("hello", "must be an object, got str"),
    ],
)
def test_records_that_are_no_message_say_why(record, error):
    with pytest.raises(ConversationError, match=error):
        message_from_record(record)


# encoding


def test_chatml_tokens_are_the_template_and_the_mask_is_the_agent_with_its_end(chatml):
    [encoded] = ChatStream(chatml).encode(EPISODE)
    assert chatml.decode(encoded.input_ids) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nYou are given few useful crafting recipes.<|im_end|>\n"
        "<|im_start|>assistant\nOK. I'll follow your instructions.<|im_end|>\n"
        "<|im_start|>user\nGoal: craft oak planks.<|im_end|>\n"
        "<|im_start|>assistant\nThought:\nLook.\n\nAction:\ninventory<|im_end|>\n"
        "<|im_start|>user\nInventory: You are not carrying anything.<|im_end|>\n"
        "<|im_start|>assistant\nAction:\nget 1 oak logs<|im_end|>"
    )
    assert chatml.decode(encoded.input_ids[encoded.loss_mask]) == (
        "Thought:\nLook.\n\nAction:\ninventory<|im_end|>Action:\nget 1 oak logs<|im_end|>"
    )
    assert encoded.input_ids.dtype == np.int32 and encoded.loss_mask.dtype == np.bool_
    assert encoded.input_ids.shape == encoded.loss_mask.shape


def test_llama3_tokens_and_mask(llama3):
    [encoded] = ChatStream(llama3).encode([user(" Goal "), agent(" get 1 "), user("Got")])
    assert llama3.decode(encoded.input_ids) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nGoal<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nget 1<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nGot<|eot_id|>"
    )
    assert llama3.decode(encoded.input_ids[encoded.loss_mask]) == "get 1<|eot_id|>"


def test_turn_ends_point_at_the_end_of_turn_tokens(chatml):
    [encoded] = ChatStream(chatml).encode([*EPISODE, user("Got"), agent("Done", False), user("x")])
    assert len(encoded.turn_ends) == 3
    stop = chatml.convert_tokens_to_ids("<|im_end|>")
    assert encoded.input_ids[list(encoded.turn_ends)].tolist() == [stop] * 3
    assert encoded.loss_mask[list(encoded.turn_ends)].tolist() == [True, True, False]
    assert not encoded.loss_mask[[end + 1 for end in encoded.turn_ends]].any()


def test_whitespace_before_the_end_of_turn_token_is_sampled_too():
    tokenizer = byte_level(LLAMA2, ["<|startoftext|>", "</s>"], "</s>")
    [encoded] = ChatStream(tokenizer).encode([user("a"), agent("b"), user("c"), agent("d")])
    assert tokenizer.decode(encoded.input_ids) == (
        "<|startoftext|>[INST] a [/INST] b </s><|startoftext|>[INST] c [/INST] d </s>"
    )
    assert tokenizer.decode(encoded.input_ids[encoded.loss_mask]) == " b </s> d </s>"


def test_text_that_would_merge_across_the_boundary_stays_apart(chatml):
    one_shot = chatml("<|im_start|>assistant\n\n\nx", add_special_tokens=False)["input_ids"]
    prompt = chatml("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    assert one_shot[: len(prompt)] != prompt, "this text is one that merges"
    [encoded] = ChatStream(chatml).encode([user("go"), agent("\n\nx")])
    sampled = chatml("\n\nx<|im_end|>", add_special_tokens=False)["input_ids"]
    assert encoded.input_ids[-len(sampled) :].tolist() == sampled
    assert encoded.loss_mask.sum() == len(sampled)
    assert encoded.input_ids[: -len(sampled)].tolist() == ChatStream(chatml).start([user("go")])


texts = st.text(max_size=12) | st.sampled_from(["\n\n x", " Action:\nget 1", "<tag>", "  "])


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    opening=texts,
    turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=4),
    template=st.sampled_from(["chatml", "llama3"]),
)
def test_encoding_equals_a_rollout_that_samples_the_same_turns(
    chatml, llama3, opening, turns, template
):
    tokenizer = {"chatml": chatml, "llama3": llama3}[template]
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}[template]
    stream = ChatStream(tokenizer)
    ids = stream.start([user(opening)])
    mask = [False] * len(ids)
    messages = [user(opening)]
    for number, (said, seen) in enumerate(turns):
        # Llama's template trims, so its model would have said it trimmed.
        text = (said.strip() if template == "llama3" else said) + end
        sampled = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, mask = ids + sampled, mask + [True] * len(sampled)
        messages.append(agent(said))
        if number < len(turns) - 1:
            more = stream.extend(sampled, [user(seen)])
            ids, mask = ids + more, mask + [False] * len(more)
            messages.append(user(seen))
    [encoded] = ChatStream(tokenizer).encode(messages)
    assert encoded.input_ids.tolist() == ids
    assert encoded.loss_mask.tolist() == mask


def test_the_end_of_turn_is_found_where_eos_is_another_token():
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    base = byte_level(QWEN25, special, "<|endoftext|>")
    assert ChatStream(base).stop_id == base.convert_tokens_to_ids("<|im_end|>")
    [encoded] = ChatStream(base).encode([user("a"), agent("b")])
    assert base.decode(encoded.input_ids[encoded.loss_mask]) == "b<|im_end|>"


REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "openmanus_rl"


@pytest.mark.bug("B17")
@pytest.mark.parametrize("name", ["babyai-val", "textcraft-val", "weather-val"])
def test_real_conversations_train_only_on_the_agents_turns(name):
    path = REAL / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"OpenManus-RL's {path.name} is not here")
    rows = pq.read_table(path, columns=["conversations"])["conversations"].to_pylist()
    tokenizer = train_tokenizer([turn["value"] for row in rows for turn in row], 600)
    names = {"human": "user", "gpt": "assistant"}
    for row in rows:
        [encoded] = ChatStream(tokenizer).encode([message_from_record(turn) for turn in row])
        whole = "".join(
            f"<|im_start|>{names[turn['from']]}\n{turn['value']}<|im_end|>\n" for turn in row
        )
        said = "".join(f"{turn['value']}<|im_end|>" for turn in row if turn["loss"])
        assert tokenizer.decode(encoded.input_ids) == whole.removesuffix("\n")
        assert tokenizer.decode(encoded.input_ids[encoded.loss_mask]) == said


# rollouts


def test_a_turn_that_ended_is_followed_by_the_rest_of_the_template(chatml):
    stream = ChatStream(chatml)
    sampled = chatml("hm<|im_end|>", add_special_tokens=False)["input_ids"]
    assert chatml.decode(stream.extend(sampled, [user("Got 4 stone")])) == (
        "\n<|im_start|>user\nGot 4 stone<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sampled[-1] == stream.stop_id


def test_a_turn_cut_short_is_closed_for_it(chatml):
    stream = ChatStream(chatml)
    for sampled in (chatml("hm", add_special_tokens=False)["input_ids"], []):
        more = stream.extend(sampled, [user("Got")])
        assert more[0] == stream.stop_id
        assert chatml.decode(more) == (
            "<|im_end|>\n<|im_start|>user\nGot<|im_end|>\n<|im_start|>assistant\n"
        )


def test_the_opening_equals_a_single_rendering_by_the_template(chatml, llama3):
    for tokenizer in (chatml, llama3):
        chat = [{"role": m.role, "content": m.content} for m in EPISODE[:3]]
        whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert ChatStream(tokenizer).start(EPISODE[:3]) == whole


def test_extend_needs_something_that_follows(chatml):
    with pytest.raises(ConversationError, match="messages that follow"):
        ChatStream(chatml).extend([1], [])


# templates that rewrite history (more in test_thinking.py)


def test_a_template_that_rewrites_history_serves_one_trained_turn_and_rollouts(thinking):
    [encoded] = ChatStream(thinking).encode(EPISODE[:4])
    assert thinking.decode(encoded.input_ids[encoded.loss_mask]) == (
        "<think>\n\n</think>\n\nThought:\nLook.\n\nAction:\ninventory<|im_end|>"
    )
    stream = ChatStream(thinking)
    more = stream.extend([5, stream.stop_id], [user("Got")])
    assert thinking.decode(more) == "\n<|im_start|>user\nGot<|im_end|>\n<|im_start|>assistant\n"


# errors


def test_no_chat_template_is_an_error(chatml):
    bare = byte_level(None, ["</s>"], "</s>")
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        ChatStream(bare).encode(EPISODE)


def test_a_template_without_end_of_turn_token_is_an_error():
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=r"ends an assistant turn with '\\n'"):
        ChatStream(byte_level(plain, ["</s>"], "</s>"))


def test_errors_of_a_template_are_passed_on():
    strict = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        ChatStream(byte_level(strict, ["</s>"], "</s>"))


def test_a_template_that_drops_the_assistant_is_an_error():
    deaf = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}</s>{% endfor %}"
    with pytest.raises(ChatTemplateError, match="omits the assistant turn"):
        ChatStream(byte_level(deaf, ["</s>"], "</s>"))


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([user("a"), user("b")], "row 3 has no assistant turn in 2 messages"),
        ([user("a"), agent("b", False)], "row 3 has no assistant turn to train on"),
        ([agent("b"), user("a")], "row 3 starts with an assistant turn"),
        ([], "row 3 has no assistant turn in 0 messages"),
    ],
)
def test_conversations_with_nothing_to_train_name_the_row(chatml, messages, error):
    with pytest.raises(ConversationError, match=error):
        ChatStream(chatml).encode(messages, name="row 3")


# a tokenizer of one's own


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_trained_tokenizer_reads_as_before_in_a_directory_of_any_family(tmp_path, family):
    text = "hello  world 1234 don't DON'T cafe\u0301 \n\n x"
    made = train_tokenizer([*TEXTS, text, text], 340, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert open_tokenizer(tmp_path, 2**20)(text)["input_ids"] == made(text)["input_ids"]


@pytest.mark.slow
def test_a_trained_tokenizer_survives_saving_and_is_deterministic(tmp_path):
    from transformers import AutoTokenizer  # takes seconds where torch is installed

    made = train_tokenizer(TEXTS, 320, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert made.get_vocab() == train_tokenizer(TEXTS, 320).get_vocab() == loaded.get_vocab()
    assert len(loaded) == 320
    assert (loaded.pad_token, loaded.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert loaded.pad_token_id != loaded.eos_token_id
    text = "Thought: größer 好 \t\n\n  x<|im_end|>"
    assert loaded.decode(loaded(text)["input_ids"]) == text
    [before], [after] = ChatStream(made).encode(EPISODE), ChatStream(loaded).encode(EPISODE)
    assert before.input_ids.tolist() == after.input_ids.tolist()
    assert loaded.decode(ChatStream(loaded).start([user("hi")])) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_another_process_trains_the_same_tokenizer():
    script = (
        "import sys; from manus_jax.data.chat import train_tokenizer;"
        "print(train_tokenizer(sys.argv[1:], 330)('inventory stone planks')['input_ids'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, *TEXTS],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "77", "RAYON_NUM_THREADS": "1", "PATH": "/usr/bin"},
    )
    ids = train_tokenizer(TEXTS, 330)("inventory stone planks")["input_ids"]
    assert run.stdout.strip().splitlines()[-1] == str(ids)


def test_a_vocabulary_too_small_for_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size 258 is too small: 256 bytes and 3 special"):
        train_tokenizer(TEXTS, 258)


def test_tokens_of_phrases_span_words_and_keep_digits_lines_and_markers_apart():
    walls = ". There are walls above you, below you."
    texts = [f"user\nYou are at {row}, {row * 7}{walls}\nGo on" for row in range(40)]
    tokenizer = train_tokenizer(texts, 400, phrases=True)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"You are at 12, 3{walls}"}], tokenize=False
    )
    tokens = [tokenizer.decode([i]) for i in tokenizer(chat)["input_ids"]]
    assert "".join(tokens) == chat
    expected = ["<|im_start|>", "user", "\n", "You are at ", "1", "2", ", ", "3", walls]
    assert tokens[: len(expected)] == expected
    assert max(len(t.split()) for t in map(tokenizer.decode, range(len(tokenizer)))) > 1
    plain = train_tokenizer(texts, 400)
    assert max(len(plain.decode([i]).split()) for i in range(len(plain))) == 1


def test_a_truncating_tokenizer_gives_whole_prompts(chatml) -> None:
    """Other users of the tokenizer may have left it in a state in which it truncates."""
    stream = ChatStream(chatml)
    expected = stream.start([user("go there")])
    chatml(["go", "go there and back"], truncation=True, max_length=2)
    try:
        assert chatml.backend_tokenizer.truncation is not None
        assert stream.start([user("go there")]) == expected
    finally:
        chatml("go")

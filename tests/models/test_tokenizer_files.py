"""Damaged tokenizers and chat templates are found when a model is opened, before any work."""

import json

import pytest

from manus_jax.data.chat import train_tokenizer
from manus_jax.models import huggingface
from manus_jax.models.architecture import Architecture, ModelError
from manus_jax.models.loading import from_path
from manus_jax.models.transformer import Compute, Transformer, init_params

ARCH = Architecture("qwen3", 300, 16, 32, 1, 2, 1, 8, qk_norm=True)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made")
    train_tokenizer(["go to the red ball"] * 3, 300, path / "tokenizer")
    card = huggingface.new_card(ARCH, path / "tokenizer")
    huggingface.save_hf(init_params(Transformer, ARCH, Compute(), 0), card, path / "model")
    return path / "model"


@pytest.fixture
def model(made, tmp_path):
    for file in made.iterdir():
        if file.name != "SHA256SUMS":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def without_words(tokenizer):
    return {**tokenizer["model"], "vocab": {}, "merges": []}


def with_a_far_token(tokenizer):
    return {**tokenizer["model"], "vocab": tokenizer["model"]["vocab"] | {"far": 5000}}


def test_a_tokenizer_that_can_encode_and_decode_is_accepted(model):
    assert from_path(model).tokenizer.decode([3]) != ""


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", "hello", '{"a":' * 50_000])
def test_a_damaged_tokenizer_is_refused(model, content):
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="tokenizer's files are damaged"):
        from_path(model)


def test_a_model_without_a_tokenizer_is_refused(model):
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"contains no tokenizer, such as tokenizer\.json"):
        from_path(model)


@pytest.mark.parametrize(
    ("part", "error"),
    [(without_words, "the tokenizer turns .* into ''"), (with_a_far_token, "has token 5000")],
)
def test_a_vocabulary_that_does_not_fit_the_model_is_refused(model, part, error):
    path = model / "tokenizer.json"
    change(path, model=part(json.loads(path.read_text())))
    with pytest.raises(ModelError, match=error):
        from_path(model)


def test_a_tokenizer_that_does_not_invert_its_encoding_is_refused(model):
    change(model / "tokenizer.json", decoder=None)
    with pytest.raises(ModelError, match=r"the tokenizer turns 'Go .* into 'G o"):
        from_path(model)


def test_a_length_limit_that_is_no_number_is_refused(model):
    change(model / "tokenizer_config.json", model_max_length="x")
    with pytest.raises(ModelError, match="tokenizer's files are damaged"):
        from_path(model)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("", "has no chat template"),
        ("{% for", "the chat template cannot be parsed"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('no') }}", "the chat template rejects"),
        ("{% for i in range(10**9) %}x{% endfor %}", "the chat template rejects"),
        ("hello", "omits the assistant turn"),
        (CHATML.replace("m.content", "'sampled9f3b7c'"), "omits the text of a user's message"),
        (CHATML.replace("<|im_end|>", ""), "no special token"),
    ],
)
def test_a_chat_template_that_cannot_render_an_episode_is_refused(model, template, error):
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=error):
        from_path(model)

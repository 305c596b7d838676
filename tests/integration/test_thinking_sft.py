"""Fine-tuning a model with Qwen3's chat template on conversations of several turns."""

import json
import sys

import pytest
from chat_templates import QWEN3, tokenizer_with

from manus_jax import command, evaluate, sft, train
from manus_jax.config.settings import ScratchSettings
from manus_jax.models import huggingface, loading


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small random model with Qwen3's template."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer_with(QWEN3).save_pretrained(directory / "tokenizer")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "head_dim": 8}
    source = loading.from_scratch(
        ScratchSettings(vocab_size=700, **sizes), (), 0, directory / "tokenizer"
    )
    huggingface.save_hf(source.open(), source.card, directory / "hf")
    return directory / "hf"


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "train.jsonl"
    said = [f"<think>\n{i}\n</think>\n\n{i + 1}" for i in range(3)]
    messages = [
        message
        for number, turn in enumerate(said)
        for message in (
            {"role": "user", "content": f"after {number}?"},
            {"role": "assistant", "content": turn},
        )
    ]
    path.write_text(json.dumps({"item_id": "count_0", "messages": messages}) + "\n")
    return path


def arguments(model, data, run_dir, *more):
    params = (
        f"model.path = '{model}'",
        f"data.train_files = ['{data}']",
        f"sft.run_dir = '{run_dir}'",
        *("sft.total_steps = 30", "sft.batch_size = 2", "data.max_length = 256", "data.rows = 8"),
        *("optimizer.lr = 0.01", "sft.export = False"),
        *more,
    )
    return [f"--gin_param={p}" for p in params]


@pytest.mark.parametrize(("thinking", "sequences"), [("keep", 1), ("strip", 3), ("off", 1)])
def test_turns_are_learnt_under_every_policy(model, data, tmp_path, thinking, sequences):
    run_dir = tmp_path / "run"
    sft.main(arguments(model, data, run_dir, f"chat.thinking = '{thinking}'"))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {row["packing/sequences_per_conversation"] for row in rows} == {sequences}
    assert rows[-1]["train/loss"] < 0.5 * rows[0]["train/loss"]
    # Two conversations with thoughts are more than 40 tokens, with and without forks.
    [tokens] = {row["train/tokens"] for row in rows}
    assert (tokens > 40) == (thinking != "off")


@pytest.mark.parametrize("program", [sft, train, evaluate])
def test_an_argument_that_the_template_does_not_have_is_one_line(
    program, model, data, tmp_path, capsys, monkeypatch
):
    wrong = "chat.template_kwargs = {'reasoning': 'high'}"
    out = tmp_path / "out"
    maze = "env.names = ['maze']"
    params = {
        train: (f"model.path = '{model}'", f"train.run_dir = '{out}'", maze, "data.rows = 8"),
        evaluate: (f"evaluate.policies = ['{model}']", f"evaluate.out_dir = '{out}'", maze),
    }.get(program, ())
    given = [f"--gin_param={p}" for p in (*params, "rollout.max_total_tokens = 2048", wrong)]
    if program is sft:
        given = arguments(model, data, out, wrong)
    monkeypatch.setattr(sys, "argv", [program.__name__, *given])
    with pytest.raises(SystemExit) as stopped:
        command.run(program.main)
    text = capsys.readouterr().err.strip()
    assert stopped.value.code == 2
    assert text.startswith("error: ") and "\n" not in text
    assert "has no argument 'reasoning'; it has enable_thinking" in text
    assert not (out / "metrics.jsonl").exists()

"""The endpoint with the real `openai` package, and the command with a real engine."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from chat_templates import QWEN25, tokenizer_with
from endpoints import serving_chat
from guide_examples import examples_for
from scripted_engine import says

from manus_jax import endpoint
from manus_jax.config.settings import ScratchSettings
from manus_jax.data.chat import ChatStream, Message
from manus_jax.errors import UserError
from manus_jax.models import huggingface, loading

openai = pytest.importorskip("openai", reason="needs the extra 'openai'")

EXAMPLES = examples_for(__file__, "docs/agents.md")
ASK: Any = {"role": "user", "content": "Where is the goal?"}
MOVE: Any = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {"type": "object", "properties": {"direction": {"type": "string"}}},
    },
}
CALL = 'I look.\n<tool_call>\n{"name": "move", "arguments": {"direction": "up"}}\n</tool_call>'


def test_a_client_gets_text_choices_log_probs_and_errors() -> None:
    with serving_chat(says("Go up. END")) as (url, engine):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        made = client.chat.completions.create(
            model="policy", messages=[ASK], n=2, stop="END", logprobs=True, temperature=0.5
        )
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="policy", messages=[ASK, {"role": "user", "content": "a " * 5000}]
            )
        names = [model.id for model in client.models.list()]
    assert [choice.message.content for choice in made.choices] == ["Go up. "] * 2
    found = made.choices[1].logprobs.content
    assert [token.logprob for token in found] == [*engine.generations[1].log_probs[:-1]]
    assert engine.requests[0].sampling.temperature == 0.5
    assert made.usage.completion_tokens == sum(len(g.token_ids) for g in engine.generations)
    assert refused.value.code == "context_length_exceeded"
    assert names == ["policy"]


def test_streams_of_text_and_of_tool_calls_arrive_whole() -> None:
    with serving_chat(says(["Go up.", CALL]), tokenizer_with(QWEN25)) as (url, _):
        client = openai.OpenAI(base_url=url, api_key="none")
        options: Any = {"include_usage": True}
        chunks = [
            *client.chat.completions.create(
                model="policy", messages=[ASK], stream=True, stream_options=options
            )
        ]
        with client.chat.completions.stream(model="policy", messages=[ASK], tools=[MOVE]) as events:
            final = events.get_final_completion()
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Go up."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.total_tokens > 0
    [call] = final.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "move",
        {"direction": "up"},
    )
    assert final.choices[0].finish_reason == "tool_calls"


def test_an_agent_loop_with_tools_is_one_sequence_of_tokens() -> None:
    with serving_chat(says([CALL, CALL, "Done."]), tokenizer_with(QWEN25)) as (url, engine):
        key = requests.post(f"{url}/episodes", timeout=30).json()["api_key"]
        client = openai.OpenAI(base_url=url, api_key=key)
        messages: list[Any] = [{"role": "system", "content": "Find it."}, ASK]
        while True:
            made = client.chat.completions.create(model="policy", messages=messages, tools=[MOVE])
            message = made.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "a wall"})
        ended = requests.post(
            f"{url}/episodes/end", headers={"Authorization": f"Bearer {key}"}, timeout=30
        )
        [segment] = ended.json()["segments"]
        prompt, last = engine.requests[-1].prompt_ids, engine.generations[-1].token_ids
    assert segment["token_ids"] == [*prompt, *last]
    assert sum(segment["loss_mask"]) == sum(len(g.token_ids) for g in engine.generations)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a small, random model."""
    directory = tmp_path_factory.mktemp("models")
    small = ScratchSettings(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, head_dim=16
    )
    source = loading.from_scratch(small, ["Where is the goal?"] * 3, 0, directory / "card")
    huggingface.save_hf(source.load(None), source.card, directory / "small")
    return directory / "small"


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[str]:
    """The URL of `python -m manus_jax.endpoint`."""
    command = [sys.executable, "-m", "manus_jax.endpoint", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving http://127.0.0.1:"), line
        yield line.split()[1]
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_the_command_serves_a_model_and_records_its_episodes(model: Path) -> None:
    bindings = [
        f"--gin_param={binding}"
        for binding in ("rollout.max_total_tokens = 256", "engine.slots = 4")
    ]
    with running("--model", str(model), *bindings) as url:
        key = requests.post(f"{url}/episodes", timeout=30).json()["api_key"]
        client = openai.OpenAI(base_url=url, api_key=key)
        made = client.chat.completions.create(
            model="policy", messages=[ASK], max_tokens=8, logprobs=True
        )
        ended = requests.post(
            f"{url}/episodes/end", headers={"Authorization": f"Bearer {key}"}, timeout=30
        )
        with pytest.raises(openai.AuthenticationError, match="the episode has ended"):
            client.chat.completions.create(model="policy", messages=[ASK])
    [segment] = ended.json()["segments"]
    chat = ChatStream(loading.from_path(model).tokenizer)
    prompt = chat.start([Message("user", ASK["content"])])
    assert segment["token_ids"][: len(prompt)] == prompt
    sampled = [p for p, m in zip(segment["log_probs"], segment["loss_mask"], strict=True) if m]
    shown = [token.logprob for token in made.choices[0].logprobs.content]
    assert sampled[: len(shown)] == pytest.approx(shown) and len(sampled) <= 8
    assert {*segment["versions"]} == {-1, 0}


def test_the_example_of_docs_agents_runs() -> None:
    [example] = EXAMPLES
    with serving_chat(says("Go up.")) as (url, _):
        exec(example.replace("http://127.0.0.1:8001/v1", url), {})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "nowhere"], "nowhere does not exist"),
        (["--model", "MODEL", "--gin_param=rollout.max_turns = 3"], "does not read it"),
        (["--model", "MODEL", "--gin_param=rollout.max_total_tokens = 99999"], "positions"),
        ([], "--model"),
    ],
)
def test_mistakes_are_one_line(model: Path, arguments: list[str], problem: str) -> None:
    given = [str(model) if word == "MODEL" else word for word in arguments]
    with pytest.raises(UserError, match=problem) as caught:
        endpoint.main(given)
    assert len(str(caught.value).splitlines()) == 1

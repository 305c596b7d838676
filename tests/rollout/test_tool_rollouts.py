"""Episodes played with tool calls in the model's own syntax, and fine-tuning on them."""

import json
from typing import Any

import pytest
from chat_templates import LLAMA, QWEN3, QWEN25, tokenizer_with
from scripted_engine import ScriptedEngine, small_tokenizer, spec_of

from envs.registry import load
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.agentgym.table import environment
from manus_jax.config.settings import ChatSettings, RolloutSettings
from manus_jax.data.chat import ChatStream, ChatTemplateError, message_from_record
from manus_jax.data.tool_calls import parse_tool_calls
from manus_jax.engines.protocol import Request
from manus_jax.rollout.action_formats import FORMATS, format_for
from manus_jax.rollout.api_player import ApiPolicy
from manus_jax.rollout.baseline_players import OraclePolicy
from manus_jax.rollout.episode import play_episode
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.traces import conversation_of
from manus_jax.rollout.trajectory import Trajectory
from manus_jax.servers.chat_api import ChatApi

SETTINGS = RolloutSettings(
    action_format="tool_call", max_turns=30, max_total_tokens=16_384, max_tokens_per_turn=600
)
MAZE = format_for(environment("maze"), "tool_call")


def call(name: str, key: str = "arguments", **arguments: object) -> str:
    return json.dumps({"name": name, key: arguments})


def tagged(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


UP = tagged(call("move", direction="up"))


def plays_oracle(item: int, key: str) -> Any:
    """Makes the oracle's moves with a call, as JSON with `key`, in tags or without."""
    policy = load("maze").oracle(item)

    def script(request: Request, seen: str) -> str:
        text = request_text(request).rpartition("The goal is at")[2]
        made = MAZE.render("", policy(f"The goal is at{text}").action)
        [move] = parse_tool_calls(made)[1]
        said = call(move.name, key, **move.arguments)
        return tagged(said) if key == "arguments" else said

    return script


def request_text(request: Request) -> str:
    return tokenizer_with(QWEN25).decode(list(request.prompt_ids))


@pytest.mark.parametrize(
    ("template", "key", "reply"),
    [
        (QWEN25, "arguments", "<|im_start|>user\n<tool_response>\nThe goal is"),
        (QWEN3, "arguments", "<|im_start|>user\n<tool_response>\nThe goal is"),
        (LLAMA, "parameters", '<|im_start|>ipython\n\n"The goal is'),
    ],
)
def test_a_model_wins_with_calls_in_its_own_syntax(
    template: str, key: str, reply: str, pool: EnvironmentPool
) -> None:
    engine = ScriptedEngine(tokenizer_with(template), plays_oracle(3, key), max_length=16_384)
    try:
        agent = EngineAgent(engine, engine.tokenizer)
        agent.check("maze", SETTINGS)
        trajectory = play_episode(spec_of("maze_3"), agent, pool, SETTINGS)
    finally:
        engine.close()
    assert isinstance(trajectory, Trajectory), trajectory
    assert trajectory.success and all(turn.valid for turn in trajectory.turns)
    first, last = (request_text(engine.requests[number]) for number in (0, -1))
    [schema] = MAZE.tools
    assert '"enum": ["up", "down", "left", "right"]' in first.replace("\n", "")
    assert schema["function"]["name"] == "move"
    assert last.count(reply) == len(trajectory.turns) - 1
    [segment] = trajectory.segments
    assert segment.loss_mask.sum() == sum(len(made.token_ids) for made in engine.generations)


def test_feedback_on_a_turn_without_a_call_comes_from_the_user(pool: EnvironmentPool) -> None:
    script = iter(["I do not know.", UP, f"{UP}\n{UP}", UP])
    engine = ScriptedEngine(tokenizer_with(QWEN25), lambda *_: next(script), max_length=16_384)
    try:
        agent = EngineAgent(engine, engine.tokenizer)
        four = RolloutSettings(**{**vars(SETTINGS), "max_turns": 4})
        trajectory = play_episode(spec_of("maze_3"), agent, pool, four)
    finally:
        engine.close()
    assert isinstance(trajectory, Trajectory)
    assert [turn.action for turn in trajectory.turns] == [None, "move up", None, "move up"]
    last = request_text(engine.requests[-1])
    assert "<|im_start|>user\nInvalid action: there is no tool call." in last
    assert "<|im_start|>user\nInvalid action: there are 2 tool calls, and none is carried" in last
    assert last.count("<tool_response>") == 1


def test_qwen3_keeps_its_thoughts_within_a_chain_of_calls(pool: EnvironmentPool) -> None:
    """Its template removes thoughts at the user's next message, and replies of tools are none."""
    said = f"<think>\nup\n</think>\n\n{UP}"
    engine = ScriptedEngine(tokenizer_with(QWEN3), lambda *_: said, max_length=16_384)
    try:
        agent = EngineAgent(engine, engine.tokenizer, 0, ChatSettings(thinking="strip"))
        three = RolloutSettings(**{**vars(SETTINGS), "max_turns": 3})
        trajectory = play_episode(spec_of("maze_3"), agent, pool, three)
    finally:
        engine.close()
    assert isinstance(trajectory, Trajectory)
    assert len(trajectory.segments) == 1 and trajectory.prompts_extended == 2


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (UP, "move up"),
        (f"<think>{UP}</think>\n{tagged(call('move', direction='left'))}", "move left"),
        (f"I go up.\n{UP}\nDone.", "move up"),
        (call("move", "parameters", direction="up"), "move up"),
        (f"{UP}\n{tagged(call('move', direction='left'))}", None),
        (tagged(call("jump")), None),
        (tagged(call("move", direction="north")), None),
        (tagged(call("move")), None),
        (tagged("move up"), None),
        ("Action: move up", None),
        (f"<think>{UP}", None),
    ],
)
def test_exactly_one_valid_call_is_an_action(text: str, action: str | None) -> None:
    parsed = MAZE.parse(text, "line")
    assert parsed.action == action
    assert parsed.valid or parsed.error.endswith("move(direction)")


def test_a_call_that_the_token_limit_cut_off_is_not_executed() -> None:
    unclosed = UP.removesuffix("</tool_call>")
    assert MAZE.parse(unclosed, "line").action == "move up"
    parsed = MAZE.parse(unclosed, "line", cut=True)
    assert not parsed.valid and "cut off inside a tool call" in parsed.error
    assert MAZE.parse(UP, "line", cut=True).valid


def test_an_environment_without_tools_of_its_own_has_one() -> None:
    assert PROMPTS["babyai"].tools == ()
    chosen = format_for(environment("babyai"), "tool_call")
    assert chosen.tools == FORMATS["tool_call"].tools
    said = tagged(call("act", command="pickup red ball 1"))
    assert chosen.parse(said, "plain_line").action == "pickup red ball 1"


def test_a_model_whose_template_has_no_tools_is_refused_before_anything_is_played() -> None:
    engine = ScriptedEngine(small_tokenizer(), lambda *_: UP)
    try:
        with pytest.raises(ChatTemplateError, match="does not show tools"):
            EngineAgent(engine, engine.tokenizer).check("maze", SETTINGS)
    finally:
        engine.close()


def test_a_policy_without_a_chat_template_is_refused() -> None:
    policy = ApiPolicy(ChatApi.parse("m@http://127.0.0.1:9/v1"))
    policy.check("maze", RolloutSettings())
    with pytest.raises(ValueError, match="shows tools through a chat template"):
        policy.check("maze", SETTINGS)


@pytest.mark.parametrize("template", [QWEN25, LLAMA])
def test_a_trace_with_calls_is_written_in_the_syntax_of_the_model(
    template: str, pool: EnvironmentPool
) -> None:
    trajectory = play_episode(spec_of("maze_3"), OraclePolicy(), pool, SETTINGS)
    assert isinstance(trajectory, Trajectory) and trajectory.success
    records = json.loads(json.dumps(conversation_of(trajectory, calls_tools=True)))
    tokenizer = tokenizer_with(template)
    [encoded] = ChatStream(tokenizer).encode(
        [message_from_record(record) for record in records], tools=MAZE.tools
    )
    trained = tokenizer.decode(encoded.input_ids[encoded.loss_mask])
    turns = [turn for turn in trained.split("<|im_end|>") if turn]
    actions = [MAZE.parse(turn, "line").action for turn in turns]
    assert actions == [turn.action for turn in trajectory.turns]

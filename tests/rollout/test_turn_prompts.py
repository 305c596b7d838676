"""Turns with prompts of their own, as in GiGPO, instead of one conversation."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chat_servers import chatting
from guide_examples import examples_for
from scripted_engine import ScriptedEngine, says, spec_of

from manus_jax.agentgym.environments import open_environments
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.prompts import PROMPTS, TurnTemplates
from manus_jax.config.settings import RolloutSettings
from manus_jax.rollout.action_formats import FORMATS
from manus_jax.rollout.api_player import ApiPolicy
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.runner import run_episodes
from manus_jax.rollout.trajectory import Trajectory
from manus_jax.servers.chat_api import ChatApi

EXAMPLES = examples_for(__file__, "docs/chat.md")
EngineOf = Callable[..., ScriptedEngine]
SETTINGS = RolloutSettings(
    prompt_source="per_turn", action_format="action", memory_turns=2, max_turns=4
)
GAME = "alfworld_402"  # two bowls, in a kitchen that has nothing else


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with open_environments({"alfworld": "embedded", "maze": "embedded"}) as opened:
        yield opened


def acts(*actions: str) -> list[str]:
    return [f"<think>so</think>\n<action>{action}</action>" for action in actions]


def play(engine: ScriptedEngine, pool: EnvironmentPool, game: str, **changes: Any) -> list[Any]:
    agent = EngineAgent(engine, engine.tokenizer)
    return run_episodes([spec_of(game)], agent, pool, dataclasses.replace(SETTINGS, **changes))


def prompts(engine: ScriptedEngine) -> list[str]:
    """The user's message of every request; there is no other one."""
    texts = [engine.tokenizer.decode(list(r.prompt_ids)) for r in engine.requests]
    assert all(text.count("<|im_start|>user\n") == 1 for text in texts)
    return [text.partition("user\n")[2].partition("<|im_end|>")[0] for text in texts]


def test_every_turn_has_the_task_the_last_turns_and_the_possible_actions(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    with pool.lease("alfworld") as session:
        first, _, _ = session.reset(402).partition("\nAVAILABLE ACTIONS: ")
        start = session.available_actions
        place = next(action.removeprefix("go to ") for action in start if "go to" in action)
        arrived = session.step(f"go to {place}").observation
        there = session.available_actions
    engine = engine_of(says([*acts(f"go to {place}", "fly", "inventory"), "I rest.", "I wait."]))
    [episode] = play(engine, pool, GAME, max_turns=5)
    shown, told, last = prompts(engine)[0], prompts(engine)[1], prompts(engine)[3]
    listed = "".join(f"\n- {action}" for action in start)
    ending = f"\n\nChoose one of them.\n\n{FORMATS['action'].instruction}"
    assert shown.endswith(
        f"your task:\n\n{first}\n\nThe commands that are possible now:{listed}{ending}"
    )
    task = first.partition("Your task is to: ")[2]
    assert f"Your task is to: {task}\n\nYou have taken 1 step(s). The last 1, each" in told
    assert f"Observation 1: {first}\nAction 1: go to {place}\n\nYou are at step 2, and" in told
    now = "".join(f"\n- {action}" for action in there)
    assert told.endswith(f"you see: {arrived}\n\nThe commands that are possible now:{now}{ending}")
    assert "You have taken 3 step(s). The last 2, each" in last and "Observation 1:" not in last
    assert f"Observation 2: {arrived}\nAction 2: fly\nObservation 3: Nothing happens.\n" in last
    assert "Action 3: inventory\n\nYou are at step 4, and you see: You are not carrying" in last
    # Every turn is a sequence of its own, of which its tokens are trained on.
    assert len(episode.segments) == len(episode.turns) == len(engine.requests)
    for segment, request, made in zip(
        episode.segments, engine.requests, engine.generations, strict=True
    ):
        assert tuple(segment.token_ids) == (*request.prompt_ids, *made.token_ids)
        assert segment.loss_mask.sum() == len(made.token_ids)
    assert "no <action>" in episode.turns[3].observation
    assert "Action 4: none that is valid\n\nYou are at step 5, and" in prompts(engine)[4]


def test_environments_without_templates_or_lists_of_actions_have_the_general_ones(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(says(acts("move up") * 4))
    [episode] = play(engine, pool, "maze_7", memory_turns=None)
    last = prompts(engine)[3]
    assert last.startswith(PROMPTS["maze"].instruction)
    assert f"The first observation:\n\n{episode.first_observation}\n\nYou have taken 3" in last
    assert f"\nAction 3: move up\n\nStep 4. You see:\n\n{episode.turns[2].observation}" in last
    assert "".join(f"\n- {action}" for action in PROMPTS["maze"].actions) in last


def test_templates_of_the_user_are_used(
    engine_of: EngineOf, pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    [example] = EXAMPLES
    monkeypatch.setitem(PROMPTS, "alfworld", PROMPTS["alfworld"])
    exec(example)
    engine = engine_of(says(acts("look") * 2))
    play(engine, pool, GAME, max_turns=2)
    asked = prompts(engine)
    assert asked[0].startswith("You see: You are in the middle of a room.")
    assert asked[1].startswith("Your task is to: ") and "\nThe last 1 of 1 steps: " in asked[1]
    # A text that mentions the format is not followed by its instruction; braces are no fields.
    own = TurnTemplates(
        "{task_description}{{}} <action>", "{current_step}/{history_length} <action>"
    )
    prompt = dataclasses.replace(PROMPTS["alfworld"], turns=own)
    monkeypatch.setitem(PROMPTS, "alfworld", prompt)
    engine = engine_of(says(acts("look") * 2))
    [episode] = play(engine, pool, GAME, max_turns=2)
    first = episode.first_observation.partition("\nAVAILABLE")[0]
    assert prompts(engine) == [f"{first.partition('is to: ')[2]}{{}} <action>", "2/1 <action>"]


def test_a_policy_behind_a_chat_api_gets_one_message_per_turn(pool: EnvironmentPool) -> None:
    seen: list[dict[str, Any]] = []
    with chatting(lambda messages: acts("look")[0], seen) as url:
        [episode] = run_episodes([spec_of(GAME)], ApiPolicy(ChatApi("m", url)), pool, SETTINGS)
    assert isinstance(episode, Trajectory)
    asked = [body["messages"] for body in seen]
    assert [len(messages) for messages in asked] == [1] * 4
    assert "Action 3: look\n\nYou are at step 4, and you see: " in asked[3][0]["content"]


def test_branches_of_a_tree_continue_with_such_prompts(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(says(acts("look", "inventory", "look", "I wait", "look")))
    parameters = {"branch_at": "turns", "turns": [1]}
    trunk, branch = play(
        engine, pool, GAME, max_turns=3, strategy="tree", strategy_parameters=parameters
    )
    asked = prompts(engine)
    assert asked[3] == asked[1]  # the turn that is played differently
    assert "Action 1: look\nObservation 2: " in asked[4] and "Action 2: I wait\n" in asked[4]
    assert [len(episode.turns) for episode in (trunk, branch)] == [3, 3]
    assert [len(episode.segments) for episode in (trunk, branch)] == [3, 2]

"""The oracles win and the random policy plays, in the same loop as a model."""

import json
import re

import pytest
from scripted_engine import spec_of
from scripted_servers import TRANSCRIPTS

from envs.registry import load
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.table import ENVIRONMENTS, environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.cancellation import Cancellation, EpisodeCancellation
from manus_jax.rollout.action_formats import FORMATS, format_for
from manus_jax.rollout.baseline_players import OraclePolicy, RandomPolicy
from manus_jax.rollout.player import EndEpisode, EpisodeContext
from manus_jax.rollout.prompts import Opening
from manus_jax.rollout.runner import run_episodes

PARSED = [name for name, f in FORMATS.items() if "plain_line" in f.styles]


def context(item_id: str) -> EpisodeContext:
    spec = spec_of(item_id)
    action_format = format_for(environment(spec.task.env))
    return EpisodeContext(
        spec,
        Opening((), False),
        action_format,
        RolloutSettings(),
        EpisodeCancellation(Cancellation()),
        1,
    )


@pytest.mark.parametrize("action_format", PARSED)
def test_the_oracle_wins_in_every_format(action_format: str, pool: EnvironmentPool) -> None:
    specs = [spec_of(f"{env}_{item}") for env in ("maze", "textcraft", "wordle") for item in (1, 2)]
    settings = RolloutSettings(max_turns=60, action_format=action_format)
    outcomes = run_episodes(specs, OraclePolicy(), pool, settings)
    assert [outcome.success for outcome in outcomes] == [True] * 6
    assert all(turn.valid for outcome in outcomes for turn in outcome.turns)
    assert all(outcome.segments == () for outcome in outcomes)


def test_the_random_policy_is_valid_and_reproducible(pool: EnvironmentPool) -> None:
    specs = [spec_of(f"{env}_{i}") for env in ("maze", "textcraft", "wordle") for i in (1, 2)]
    settings = RolloutSettings(max_turns=6)

    def actions(seed: int) -> list[list[str | None]]:
        outcomes = run_episodes(specs, RandomPolicy(seed), pool, settings)
        return [[turn.action for turn in outcome.turns] for outcome in outcomes]

    first = actions(0)
    assert first == actions(0) != actions(1)
    assert all(action is not None for episode in first for action in episode)
    assert len({action for episode in first for action in episode}) > 5


@pytest.mark.parametrize("env", sorted(ENVIRONMENTS))
def test_the_random_policy_has_a_valid_action_in_every_environment(env: str) -> None:
    told = context(f"{env}_0")
    player = RandomPolicy().player(told)
    player.observe("Something is seen.")
    said = {player.act(turn).text for turn in range(5)}
    assert all(told.action_format.parse(text, environment(env).action).valid for text in said)


def test_the_random_policy_uses_the_actions_that_babyai_lists() -> None:
    game = load("babyai").new_game()
    seen = game.reset(3)
    player = RandomPolicy().player(context("babyai_3"))
    player.observe(seen)
    for turn in range(10):
        action = context("babyai_3").action_format.parse(player.act(turn).text, "plain_line").action
        assert f'"{action}"' in seen


def test_an_oracle_that_knows_no_way_on_gives_up() -> None:
    player = OraclePolicy().player(context("maze_3"))
    player.observe("Nothing that tells a position.")
    with pytest.raises(EndEpisode) as silence:
        player.act(0)
    assert silence.value.reason == "gave_up"


def test_environments_without_an_oracle_are_refused_with_those_that_have_one() -> None:
    with pytest.raises(ValueError, match=r"webarena has no oracle.* textcraft(, \w+)*$"):
        OraclePolicy().check("webarena", RolloutSettings())
    OraclePolicy().check("maze", RolloutSettings())


def test_the_random_policy_searches_and_clicks_in_webshop() -> None:
    game = load("webshop").new_game()
    player = RandomPolicy().player(context("webshop_3"))
    wish = game.reset(3)
    player.observe(wish)
    searched = context("webshop_3").action_format.parse(player.act(0).text, "line").action
    assert searched.startswith("search[") and searched[7:-1] in wish
    player.observe(game.step(searched).observation)
    assert "\nclick[" in player.act(1).text


def recorded_steps(name: str) -> list[list[dict]]:
    """The answers to the resets and steps of every recorded session, in order."""
    sessions: dict[object, list[dict]] = {}
    for line in (TRANSCRIPTS / f"{name}.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["request"]["path"] in ("/reset", "/step") and entry["status"] == 200:
            body = entry["request"]["body"]
            answer = json.loads(entry["response_text"])
            sessions.setdefault(body.get("id", body.get("env_idx")), []).append(answer)
    return list(sessions.values())


def test_the_random_policy_uses_the_actions_that_alfworld_lists() -> None:
    played: set[str] = set()
    for session in recorded_steps("alfworld"):
        seen: list[str] = []
        for number, answer in enumerate(session):
            listed = f"\nAVAILABLE ACTIONS: {','.join(answer['available_actions'])}"
            seen.append(answer["observation"] + ("" if number else listed))
            player = RandomPolicy().player(context("alfworld_196"))
            for observation in seen:
                player.observe(observation)
            texts = [player.act(turn).text for turn in range(50)]
            actions = {context("alfworld_196").action_format.parse(t, "line").action for t in texts}
            assert actions <= set(answer["available_actions"])
            played |= actions
    verbs = {action.split()[0] for action in played}
    assert verbs == {"go", "look", "inventory", "examine", "open", "take", "put"}


def test_the_random_policy_clicks_only_buttons_of_the_recorded_shop() -> None:
    [session] = recorded_steps("webshop")
    seen, clicked = [], set()
    for answer in session[:-1]:
        seen.append(answer[0] if isinstance(answer, list) else answer["state"])
        player = RandomPolicy().player(context("webshop_3"))
        for observation in seen:
            player.observe(observation)
        texts = [player.act(turn).text for turn in range(100)]
        clicked |= {context("webshop_3").action_format.parse(t, "line").action for t in texts[1:]}
    buttons = {"back to search", "next >", "< prev", "description", "features", "reviews"}
    options = {"white", "green", "red", "small", "medium", "large"}
    products = {action for action in clicked if re.fullmatch(r"click\[b0[0-9a-z]{8}\]", action)}
    assert len(products) == 10
    searches = {action for action in clicked if action.startswith("search[Find me easy use")}
    assert clicked - products - searches == {f"click[{b}]" for b in buttons | options | {"buy now"}}

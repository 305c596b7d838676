"""The client with recorded responses of AgentGym's servers."""

import json
from typing import Any

import pytest
from scripted_servers import TRANSCRIPTS, Reply, recorded, serving

from manus_jax.agentgym.client import Session
from manus_jax.agentgym.connection import server_root
from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind
from manus_jax.agentgym.table import ENVIRONMENTS


def recorded_answer(name: str, path: str, body: object, nth: int = 0) -> dict:
    """The recorded answer to a request, read from the transcript itself."""
    found = []
    for line in (TRANSCRIPTS / f"{name}.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["request"]["path"] == path and entry["request"]["body"] == body:
            found.append(json.loads(entry["response_text"]))
    return found[nth]


def opened(name: str, url: str) -> Session:
    session = Session(ENVIRONMENTS[name], url)
    session.create()
    return session


@pytest.mark.bug("B3")
def test_textcraft_plays_the_recorded_game_to_its_reward() -> None:
    with serving(recorded("textcraft")) as url:
        opened("textcraft", url)
        session = opened("textcraft", url)
        assert session.id == 130
        view = session.reset(200)
        reset = recorded_answer("textcraft", "/reset", {"id": 130, "data_idx": 200})
        assert view == reset["observation"]
        actions = [
            "get 2 planks",
            "get 2 bamboo",
            "craft 1 stick using 2 bamboo",
            "get 2 bamboo",
            "craft 1 stick using 2 bamboo",
            "get 1 warped stems",
            "craft 4 warped planks using 1 warped stems",
            "craft 3 warped fence using 2 stick, 4 warped planks",
        ]
        results = [session.step(action) for action in actions]
        assert results[0].observation == "Could not find planks"
        assert [result.reward for result in results] == [0] * 7 + [1]
        assert [result.done for result in results] == [False] * 7 + [True]
        assert (session.episode_reward, session.success) == (1.0, True)
        session.close()


def test_textcraft_answers_of_the_game_are_observations() -> None:
    with serving(recorded("textcraft")) as url:
        session = opened("textcraft", url)
        assert session.id == 0
        session.reset(0)
        assert session.step("dance").observation == "Could not execute dance"
        assert session.step("inventory").observation == "Inventory: You are not carrying anything."
        session.id = 999
        with pytest.raises(EnvironmentFailure, match="The id 999 is not valid") as caught:
            session.step("inventory")
        assert caught.value.kind is FailureKind.ERROR_ANSWER
        assert str(caught.value).startswith(f"textcraft at {url}: POST /step: ")


def test_babyai_takes_the_reward_and_ends_at_done() -> None:
    with serving(recorded("babyai")) as url:
        session = opened("babyai", url)
        view = session.reset(4)
        assert view.startswith("Your goal: go to a green key\n")
        assert session.step("turn left").info == {"reward": 0, "score": 0}
        assert session.step("fly").observation.startswith("The action is not recognized.")
        session.reset(0)
        result = session.step("go to red ball 1")
        assert (result.reward, result.done) == (0.8875, True)
        assert (session.episode_reward, session.success) == (0.8875, True)
        with pytest.raises(RuntimeError, match="call reset"):
            session.step("turn left")
        session.close()


def test_sciworld_first_observation_is_the_task_and_the_room() -> None:
    with serving(recorded("sciworld")) as url:
        session = opened("sciworld", url)
        view = session.reset(0)
        assert view.startswith("Your task is to boil water.")
        assert "\nThis room is called the hallway." in view
        for action in ("look around", "open door to kitchen", "fly", "inventory", "task"):
            result = session.step(action)
            assert (result.reward, result.done) == (0.0, False)
            assert result.info["score"] == 0
        assert not session.success


def test_sqlgym_plays_one_step_episodes_on_one_session() -> None:
    answer, shown = recorded("sqlgym"), [Reply("")]

    def server(method: str, path: str, body: Any) -> Reply:
        # Recorded after a reset of item 0 only; the server shows the question of the last reset.
        if path.startswith("/observation"):
            return shown[0]
        reply = answer(method, path, body)
        if path == "/reset":
            shown[0] = Reply(json.dumps(json.loads(reply.text)[0]))
        return reply

    with serving(server) as url:
        session = opened("sqlgym", url)
        assert session.id == 329863
        assert session.reset(0).endswith("How many items are there?")
        wrong = session.step("SELECT name FROM item")
        assert (wrong.reward, wrong.done, session.success) == (0.0, True, False)
        assert wrong.observation == "[('pen',), ('book',), ('lamp',)]"
        assert wrong.info["info"] == {"ground_truth": "SELECT COUNT(*) FROM item"}
        session.reset(0)
        right = session.step("SELECT COUNT(*) FROM item")
        assert (right.reward, right.done, session.success) == (1.0, True, True)
        session.reset(1)
        assert session.step("SELEC bad").observation == 'near "SELEC": syntax error'
        # No close route: 404 is what the real server says, and not a failure.
        session.close()


def test_sqlgym_item_out_of_range_is_the_datasets_fault() -> None:
    with serving(recorded("sqlgym")) as url:
        session = opened("sqlgym", url)
        with pytest.raises(EnvironmentFailure, match=r"item 99999 is outside 0\.\.10961") as caught:
            session.reset(99999)
        assert caught.value.kind is FailureKind.ITEM
        assert not caught.value.retryable


@pytest.mark.parametrize("prefix_in_url", ["", "/wordle", "/wordle/"])
def test_wordle_shows_the_words_and_counts_the_right_guess(prefix_in_url: str) -> None:
    with serving(recorded("wordle", prefix="/wordle")) as url:
        root = server_root(ENVIRONMENTS["wordle"], url + prefix_in_url)
        assert root == url
        lost = opened("wordle", root)
        view = lost.reset(3)
        assert view.startswith("Let's start Wordle!\n")
        assert "panic, solar, shire" in view
        guesses = ["p a n i c", "zzzzz", "solar", "s o l a r", "r o b o t", "l i g h t"]
        results = [lost.step(guess) for guess in guesses]
        assert results[1].observation == "invalid word"
        assert [result.done for result in results] == [False] * 5 + [True]
        assert (lost.episode_reward, lost.success) == (0.0, False)
        won = opened("wordle", root)
        assert won.id == 1
        won.reset(0)
        rewards = [won.step(guess).reward for guess in ("p a n i c", "s o l a r", "a r o m a")]
        assert rewards == [0, 0, 1]
        assert won.success


def test_movie_is_sent_the_models_text_as_it_is() -> None:
    with serving(recorded("movie")) as url:
        session = opened("movie", url)
        assert session.id == 0
        assert session.reset(0).startswith("Now new trial starts.\n")
        assert session.step("hello").observation.startswith("Format error")
        result = session.step("Thought: x\n\nAction: check_valid_actions with Action Input: {}")
        assert "'get_search_movie'" in result.observation
        end = session.step('Thought: done\n\nAction: finish with Action Input: {"answer": "1"}')
        assert (end.reward, end.done, session.success) == (0.0, True, False)


def test_weather_without_its_web_service_is_a_failure_and_not_a_zero() -> None:
    with serving(recorded("weather")) as url:
        session = opened("weather", url)
        session.reset(0)
        date = session.step(
            "Thought: need date\n\nAction: get_user_current_date with Action Input: {}"
        )
        assert date.observation == "Observation: 2023-06-15\nGive me one action."
        action = 'get_latitude_longitude with Action Input: {"name": "Shanghai"}'
        with pytest.raises(EnvironmentFailure, match="the server depends on failed") as caught:
            session.step(f"Thought: x\n\nAction: {action}")
        assert caught.value.kind is FailureKind.BACKEND
        end = session.step('Thought: done\n\nAction: finish with Action Input: {"answer": "1"}')
        assert end.done


def test_alfworld_plays_the_recorded_game_to_its_reward() -> None:
    with serving(recorded("alfworld")) as url:
        opened("alfworld", url)
        session = opened("alfworld", url)
        assert session.reset(196).endswith("go to sinkbasin 1,inventory,look")
        actions = [
            "go to cabinet 1",
            "open cabinet 1",
            "take alarmclock 1 from cabinet 1",
            "go to desk 1",
            "move alarmclock 1 to desk 1",
            "put alarmclock 1 in/on desk 1",
        ]
        results = [session.step(action) for action in actions]
        assert results[4].observation == "Nothing happens."
        assert [result.reward for result in results] == [0, 0, 0, 0, 0, 1]
        assert (results[-1].done, session.success) == (True, True)
        session.close()


def test_webshop_plays_the_recorded_purchase() -> None:
    with serving(recorded("webshop")) as url:
        opened("webshop", url)
        session = opened("webshop", url)
        assert session.reset(3).startswith("WebShop [SEP] Instruction: [SEP] Find me easy use hair")
        actions = [
            "search[tea tree natural]",
            "click[b07djjxgb5]",
            "click[small]",
            "click[buy now]",
        ]
        results = [session.step(action) for action in actions]
        assert [result.done for result in results] == [False, False, False, True]
        assert session.episode_reward == pytest.approx(1 / 12)
        assert not session.success


def test_the_deadlock_of_academias_imports_is_a_failure_and_no_observation() -> None:
    with serving(recorded("academia")) as url:
        session = opened("academia", url)
        assert session.reset(18).startswith("Now new trial starts.")
        text = "Thought: I try something.\n\nAction: loadAuthorNet with Action Input: {}"
        with pytest.raises(EnvironmentFailure, match="_DeadlockError") as caught:
            session.step(text)
        assert (caught.value.kind, caught.value.retryable) == (FailureKind.BACKEND, True)


def test_a_sheet_server_without_credentials_creates_no_session() -> None:
    with serving(recorded("sheet")) as url, pytest.raises(EnvironmentFailure) as caught:
        opened("sheet", url)
    assert caught.value.kind is FailureKind.STATUS

"""weather: tools, climate, grading, and AgentGym's parsing of actions."""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from env_servers import Client
from fingerprints import fingerprint, fingerprint_elsewhere
from oracle_episodes import oracle_episode

from envs.game import GameError
from envs.weather import SPEC
from envs.weather.climate import weather
from envs.weather.game import FORMAT_ERROR, Weather, parse
from envs.weather.places import CITIES, find
from envs.weather.tasks import TEMPLATES, grade, question
from envs.weather.tools import TOOLS, BadCall, Situation, air_quality_level, call, distance

TRANSCRIPT = Path(__file__).parents[1] / "support" / "transcripts" / "weather.jsonl"
OSLO = find("oslo")
assert OSLO is not None
NOW = Situation(OSLO, date(2023, 6, 15))


def test_tools_answer_in_the_recorded_shapes() -> None:
    at = {"latitude": 59.91, "longitude": 10.75}
    assert call(NOW, "get_user_current_date", {}) == "2023-06-15"
    assert call(NOW, "get_user_current_location", {}) == "Oslo"
    place = call(NOW, "get_latitude_longitude", {"name": "  NEW  york "})["results"][0]
    assert place == {
        "name": "New York",
        "latitude": 40.7143,
        "longitude": -74.006,
        "country_code": "US",
    }
    span = {"start_date": "2023-06-01", "end_date": "2023-06-03"}
    report = call(NOW, "get_historical_temp", {**at, **span})
    assert list(report) == ["latitude", "longitude", "daily_units", "daily"]
    assert report["daily_units"] == {
        "time": "iso8601",
        "temperature_2m_max": "°C",
        "temperature_2m_min": "°C",
        "temperature_2m_mean": "°C",
    }
    assert report["daily"]["time"] == ["2023-06-01", "2023-06-02", "2023-06-03"]
    assert all(len(column) == 3 for column in report["daily"].values())
    assert call(NOW, "get_elevation", at) == {"elevation": [26.0]}


def test_past_present_and_future_have_their_own_tools() -> None:
    at = {"latitude": 59.91, "longitude": 10.75}
    today = {"start_date": "2023-06-15", "end_date": "2023-06-15"}
    with pytest.raises(BadCall, match="end_date should be earlier than current_date"):
        call(NOW, "get_historical_rain", {**at, **today})
    with pytest.raises(BadCall, match="start_date should be later than current_date"):
        call(NOW, "get_rain_forecast", {**at, **today})
    with pytest.raises(BadCall, match="current date"):
        call(NOW, "get_current_rain", {**at, "current_date": "2023-06-14"})
    assert call(NOW, "get_current_rain", {**at, "current_date": "2023-06-15"})["daily"]


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("no_such_tool", {}),
        ("get_elevation", {}),
        ("get_elevation", {"latitude": 1}),
        ("get_elevation", {"latitude": 1, "longitude": 2, "height": 3}),
        ("get_elevation", {"latitude": "1", "longitude": 2}),
        ("get_elevation", {"latitude": True, "longitude": 2}),
        ("get_elevation", {"latitude": None, "longitude": 2}),
        ("get_elevation", {"latitude": 91, "longitude": 2}),
        ("get_elevation", {"latitude": float("nan"), "longitude": 2}),
        ("get_elevation", {"latitude": float("inf"), "longitude": 2}),
        ("get_elevation", {"latitude": 10**400, "longitude": 2}),
        ("get_latitude_longitude", {"name": ["Oslo"]}),
        ("get_latitude_longitude", {"name": "Atlantis"}),
        ("get_current_snow", {"latitude": 1, "longitude": 2, "current_date": "yesterday"}),
        ("get_current_snow", {"latitude": 1, "longitude": 2, "current_date": "2023-02-30"}),
        (
            "get_historical_snow",
            {"latitude": 1, "longitude": 2, "start_date": "0001-01-01", "end_date": "2023-01-01"},
        ),
        (
            "get_historical_snow",
            {"latitude": 1, "longitude": 2, "start_date": "2023-02-01", "end_date": "2023-01-01"},
        ),
    ],
)
def test_wrong_calls_are_explained(tool: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(BadCall) as refusal:
        call(NOW, tool, arguments)
    assert 0 < len(str(refusal.value)) < 200


def test_distance_and_air_levels_agree_with_known_values() -> None:
    assert distance((0.0, 0.0), (0.0, 180.0)) == pytest.approx(20015.1, abs=0.1)  # half round
    assert distance((52.52, 13.405), (48.8566, 2.3522)) == pytest.approx(877.5, abs=1)
    levels = [air_quality_level(index) for index in (0, 19.9, 20, 55, 79, 99.9, 100)]
    assert levels == ["good", "good", "fair", "moderate", "poor", "very poor", "extremely poor"]


def test_the_climate_is_colder_in_winter_towards_the_poles_and_above() -> None:
    def mean(name: str, month: int) -> float:
        place = find(name)
        assert place is not None
        days = [date(2023, month, day) for day in range(1, 29)]
        return sum(weather(place.latitude, place.longitude, day).mean for day in days) / 28

    assert mean("Oslo", 1) < mean("Oslo", 7) - 10
    assert mean("Sydney", 1) > mean("Sydney", 7) + 5
    assert mean("Singapore", 1) > mean("Paris", 1) > mean("Reykjavik", 1)
    assert mean("Quito", 4) < mean("Lagos", 4) - 5
    for city in CITIES[::9]:
        for day in (date(2023, 2, 3), date(2023, 8, 3)):
            found = weather(city.latitude, city.longitude, day)
            assert found.low < found.mean < found.high
            assert found.rain == 0 or found.snow == 0


def test_the_last_action_of_the_text_counts() -> None:
    assert parse('Action: finish with Action Input: {"answer": 1}') == ("finish", {"answer": 1})
    text = "Thought: first\nAction: a with Action Input: {}\n\nAction: b with Action Input: {}"
    assert parse(text) == ("b", {})
    assert parse("Thought: x\n\nAction: a with Action Input: ") == ("a", {})
    assert parse('Action: a with Action Input: {\n "b": [1]\n}\n') == ("a", {"b": [1]})
    for bad in (
        "hello",
        "",
        "Action: a",
        "Action: a with Action Input: [1]",
        "Action: a with Action Input: {1}",
        'Action: a with Action Input: {"b": 1} and more',
        'Action: a with Action Input: {"b": ' + "[" * 5000,
        'Action: a with Action Input: {"b": ' + "9" * 5000 + "}",
        "Action: " * 2000,
    ):
        assert parse(bad) is None


@pytest.mark.parametrize(
    ("right", "given", "expected"),
    [
        (3.5, 3.5, 1),
        (3.5, "3.54", 1),
        (3.5, 3.6, 0),
        (3.0, 3, 1),
        (3.0, True, 0),
        (3.0, "three", 0),
        (3.0, float("nan"), 0),
        ("Yes", " yes. ", 1),
        ("Yes", "No", 0),
        ([1.0, 2.0], [1.0, 2.04], 1),
        ([1.0, 2.0], [1, 9], 0.5),
        ([1.0, 2.0], [1.0], 0),
        ([1.0, 2.0], "1.0, 2.0", 0),
    ],
)
def test_answers_are_graded_with_room_for_rounding(right: Any, given: Any, expected: float) -> None:
    assert grade(right, given) == expected


def test_only_a_proper_finish_ends_the_episode() -> None:
    game = Weather()
    game.reset(0)
    for text in (
        "Action: finish with Action Input: {}",
        'Action: finish with Action Input: {"answer": null}',
        'Action: finish with Action Input: {"answer": [[1]]}',
        'Action: finish with Action Input: {"answer": {"a": 1}}',
        'Action: finish with Action Input: {"answer": 1, "why": 2}',
    ):
        step = game.step(text)
        assert not step.done and step.observation.startswith("Observation: Error: finish takes")
    assert game.step("I do not know").observation == FORMAT_ERROR
    end = game.step('Action: finish with Action Input: {"answer": "no idea"}')
    assert (end.observation, end.reward, end.done) == (
        "Observation: no idea\nGive me one action.",
        0,
        True,
    )
    with pytest.raises(GameError):
        game.step("Action: finish with Action Input: {}")


def test_every_template_gives_questions_that_its_own_calls_answer() -> None:
    for item in range(len(TEMPLATES)):
        asked = question(item)
        reports = str([call(asked.situation, tool, args) for _, tool, args in asked.calls])
        if isinstance(asked.answer, float) and "minus" not in asked.text and len(asked.calls) == 4:
            number = str(asked.answer)
            assert number in reports or any(word in asked.text for word in ("many", "higher"))


def test_the_oracle_wins_on_the_test_split() -> None:
    for item in SPEC.items("test")[::2]:
        last = oracle_episode(SPEC, item)[-1]
        assert last.done and last.reward == 1, item


def test_splits_are_disjoint_in_items_and_in_questions() -> None:
    train, test = SPEC.items("train"), SPEC.items("test")
    assert not set(train) & set(test)
    asked = [{(question(n).situation, question(n).text) for n in items} for items in (train, test)]
    assert not asked[0] & asked[1]
    with pytest.raises(GameError, match="does not exist"):
        question(1200)


@pytest.mark.slow
def test_items_are_the_same_in_another_process() -> None:
    items = list(range(0, 1200, 23))
    assert fingerprint("weather", items) == fingerprint_elsewhere("weather", items)


def test_the_server_answers_in_the_recorded_shapes(served: Callable[[str], str]) -> None:
    client = Client(served("weather"))
    assert client.post("/create", {})[0] == 422
    assert client.post("/create", {"id": 10**6})[0] == 500
    session = -1
    for line in TRANSCRIPT.read_text(encoding="utf-8").splitlines():
        exchange = json.loads(line)
        method, path, body = (exchange["request"][key] for key in ("method", "path", "body"))
        expected = json.loads(exchange["response_text"])
        if body is not None and "env_idx" in body:
            body = {**body, "env_idx": session}
        path = path.split("=")[0] + f"={session}" if "=" in path else path
        status, answer = client.get(path) if method == "GET" else client.post(path, body)
        assert status == exchange["status"] and type(answer) is type(expected)
        if path == "/create":
            session = answer
        elif path == "/step":
            assert set(answer) == set(expected) and answer["done"] == expected["done"]
            if expected["observation"].startswith("Format error"):
                assert answer == expected
        elif "observation" in path or path == "/reset":
            start = "Now new trial starts.\nYou should perform actions to accomplish the goal: "
            assert answer.startswith(start) and answer.endswith("\nGive me one action.")
    names = [name for name in TOOLS if name.startswith("get_")]
    valid = json.loads(TRANSCRIPT.read_text().splitlines()[6])["response_text"]
    assert all(name in valid for name in names)


def test_a_reset_without_an_item_starts_the_same_question_again(
    served: Callable[[str], str],
) -> None:
    client = Client(served("weather"))
    session = client.ok("/create", {"id": 17})
    first = client.get(f"/observation?env_idx={session}")[1]
    assert question(17).text in first
    client.ok("/step", {"env_idx": session, "action": "x" * 1_000_000})
    assert client.ok("/reset", {"env_idx": session, "id": None}) == first
    assert client.ok("/close", {"env_idx": session}) is True

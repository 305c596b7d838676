"""The tools of the weather assistant, with AgentGym's names.

A tool is a function of the user's situation and validated arguments that returns what a web service
would return. Every mistake in a call is reported to the agent in a sentence.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from envs.weather.climate import Day, elevation, weather
from envs.weather.places import Place, find

MAX_DAYS = 366
FINISH = "finish"
CHECK = "check_valid_actions"


@dataclass(frozen=True)
class Situation:
    """Where and when the user asks."""

    home: Place
    today: date


class BadCall(Exception):
    """An invalid call; the message is shown to the agent."""


@dataclass(frozen=True)
class Tool:
    """A tool and the names of its arguments, which `answer` gets validated, in this order."""

    name: str
    arguments: tuple[str, ...]
    answer: Callable[..., Any]


def call(situation: Situation, name: str, arguments: Mapping[str, Any]) -> Any:
    """The result of a call; BadCall for an unknown tool or invalid arguments."""
    if name == CHECK:
        return f"You can use following valid actions: {[*TOOLS, CHECK, FINISH]}"
    tool = TOOLS.get(name)
    if tool is None:
        raise BadCall(f"there is no action {name!r}; {CHECK} lists the actions")
    if set(arguments) != set(tool.arguments):
        wanted = ", ".join(tool.arguments) or "no arguments"
        given = ", ".join(map(str, arguments)) or "no arguments"
        raise BadCall(f"{name} takes {wanted}, not {given}")
    checked = [_check(argument, arguments[argument]) for argument in tool.arguments]
    return tool.answer(situation, *checked)


def distance(from_place: tuple[float, float], to_place: tuple[float, float]) -> float:
    """Great-circle distance in kilometres between two (latitude, longitude)."""
    (lat1, lon1), (lat2, lon2) = (
        (math.radians(latitude), math.radians(longitude))
        for latitude, longitude in (from_place, to_place)
    )
    chord = (
        math.sin((lat2 - lat1) / 2) ** 2
        + math.cos(lat1) * math.cos(lat2) * math.sin((lon2 - lon1) / 2) ** 2
    )
    return round(2 * 6371.0 * math.asin(min(1.0, math.sqrt(chord))), 1)


def air_quality_level(index: float) -> str:
    """The European level of an air quality index."""
    levels = ((20, "good"), (40, "fair"), (60, "moderate"), (80, "poor"), (100, "very poor"))
    return next((name for bound, name in levels if index < bound), "extremely poor")


def days(first: date, last: date) -> list[date]:
    return [first + timedelta(n) for n in range((last - first).days + 1)]


_KINDS: dict[str, tuple[tuple[str, str, Callable[[Day], float]], ...]] = {
    "temp": (
        ("temperature_2m_max", "°C", lambda day: day.high),
        ("temperature_2m_min", "°C", lambda day: day.low),
        ("temperature_2m_mean", "°C", lambda day: day.mean),
    ),
    "rain": (("rain_sum", "mm", lambda day: day.rain),),
    "snow": (("snowfall_sum", "cm", lambda day: day.snow),),
    "air_quality_index": (("pm2_5", "μg/m³", lambda day: day.air_quality),),
}


def _report(kind: str, latitude: float, longitude: float, dates: list[date]) -> dict[str, Any]:
    found = [weather(latitude, longitude, day) for day in dates]
    columns = _KINDS[kind]
    return {
        "latitude": round(latitude, 2),
        "longitude": round(longitude, 2),
        "daily_units": {"time": "iso8601", **{name: unit for name, unit, _ in columns}},
        "daily": {
            "time": [day.isoformat() for day in dates],
            **{name: [value(day) for day in found] for name, _, value in columns},
        },
    }


def _historical(kind: str) -> Callable[..., Any]:
    def answer(now: Situation, lat: float, lon: float, start: date, end: date) -> Any:
        if end >= now.today:
            raise BadCall("end_date should be earlier than current_date")
        return _report(kind, lat, lon, _span(start, end))

    return answer


def _forecast(kind: str) -> Callable[..., Any]:
    def answer(now: Situation, lat: float, lon: float, start: date, end: date) -> Any:
        if start <= now.today:
            raise BadCall("start_date should be later than current_date")
        return _report(kind, lat, lon, _span(start, end))

    return answer


def _current(kind: str) -> Callable[..., Any]:
    def answer(now: Situation, lat: float, lon: float, today: date) -> Any:
        if today != now.today:
            raise BadCall("current_date should be the user's current date")
        return _report(kind, lat, lon, [today])

    return answer


def _span(start: date, end: date) -> list[date]:
    if start > end:
        raise BadCall("start_date should not be later than end_date")
    if (end - start).days >= MAX_DAYS:
        raise BadCall(f"the dates should be at most {MAX_DAYS} days apart")
    return days(start, end)


def _locate(_: Situation, name: str) -> Any:
    place = find(name)
    if place is None:
        raise BadCall(f"no place is named {name[:80]!r}")
    return {
        "results": [
            {
                "name": place.name,
                "latitude": place.latitude,
                "longitude": place.longitude,
                "country_code": place.country_code,
            }
        ]
    }


def _check(argument: str, value: Any) -> Any:
    """The value converted for the tool; BadCall if it is not valid."""
    if argument == "name":
        if not isinstance(value, str):
            raise BadCall("name should be a string")
        return value
    if argument.endswith("date"):
        if not isinstance(value, str) or len(value) != 10:
            raise BadCall(f"{argument} should be a date like 2023-05-30")
        try:
            return date.fromisoformat(value)
        except ValueError:
            raise BadCall(f"{argument} should be a date like 2023-05-30") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadCall(f"{argument} should be a number")
    bound = 90 if "latitude" in argument else 180 if "longitude" in argument else 1e9
    if not -bound <= value <= bound:
        raise BadCall(f"{argument} should be between {-bound:g} and {bound:g}")
    return float(value)


_SPAN = ("latitude", "longitude", "start_date", "end_date")
_TODAY = ("latitude", "longitude", "current_date")


def _tools() -> list[Tool]:
    made = [
        Tool("get_user_current_date", (), lambda now: now.today.isoformat()),
        Tool("get_user_current_location", (), lambda now: now.home.name),
    ]
    for kind in ("temp", "rain", "snow", "air_quality_index"):
        made.append(Tool(f"get_historical_{kind}", _SPAN, _historical(kind)))
        made.append(Tool(f"get_current_{kind}", _TODAY, _current(kind)))
        if kind != "air_quality_index":
            made.append(Tool(f"get_{kind}_forecast", _SPAN, _forecast(kind)))
    return [
        *made,
        Tool("get_latitude_longitude", ("name",), _locate),
        Tool(
            "get_elevation",
            ("latitude", "longitude"),
            lambda _, lat, lon: {"elevation": [elevation(lat, lon)]},
        ),
        Tool(
            "get_distance",
            ("latitude1", "longitude1", "latitude2", "longitude2"),
            lambda _, lat1, lon1, lat2, lon2: distance((lat1, lon1), (lat2, lon2)),
        ),
        Tool(
            "get_air_quality_level",
            ("air_quality_index",),
            lambda _, index: air_quality_level(index),
        ),
    ]


TOOLS = {tool.name: tool for tool in _tools()}

"""The questions for the weather assistant, with their answers and the tool calls they need.

A template draws places, days and a quantity, computes the answer from the same weather that the
tools report, and lists the calls that a perfect assistant makes.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import lru_cache
from typing import Any

from envs.game import GameError, fixed_splits
from envs.weather.climate import Day, weather
from envs.weather.places import CITIES, Place
from envs.weather.tools import Situation, air_quality_level, days, distance

ITEMS = 1200
TEST_ITEMS = 200

items = fixed_splits(train=range(ITEMS - TEST_ITEMS), test=range(ITEMS - TEST_ITEMS, ITEMS))

Answer = str | float | list[float]
Call = tuple[str, str, dict[str, Any]]
"""(why, tool, arguments)."""


@dataclass(frozen=True)
class Question:
    """The question of one item."""

    situation: Situation
    text: str
    answer: Answer
    calls: tuple[Call, ...]


@lru_cache(maxsize=4096)
def question(item: int) -> Question:
    """The question of an item; GameError for an unknown item."""
    if not 0 <= item < ITEMS:
        raise GameError(f"The id {item} does not exist: weather has 0 to {ITEMS - 1}.")
    rng = random.Random(f"weather question {item}")
    template = TEMPLATES[item % len(TEMPLATES)]
    while True:
        today = date(2023, 1, 15) + timedelta(rng.randrange(330))
        made = template(_Draw(rng, Situation(rng.choice(CITIES), today)))
        if made is not None:
            return made


class _Draw:
    """The random choices of one question, and the calls it needs so far."""

    def __init__(self, rng: random.Random, situation: Situation) -> None:
        self.rng = rng
        self.situation = situation
        self.today = situation.today
        self.calls: list[Call] = []

    def ask(self, text: str, answer: Answer) -> Question:
        return Question(self.situation, text, answer, tuple(self.calls))

    def knows_date(self) -> None:
        self.calls.append(("I have to know today's date.", "get_user_current_date", {}))

    def place(self, home: bool = False) -> Place:
        """The user's city or another one, with the calls that find its coordinates."""
        if home:
            why = "The question is about where the user is."
            self.calls.append((why, "get_user_current_location", {}))
            place = self.situation.home
        else:
            place = self.rng.choice([city for city in CITIES if city != self.situation.home])
        why = f"I need the coordinates of {place.name}."
        self.calls.append((why, "get_latitude_longitude", {"name": place.name}))
        return place

    def other(self, place: Place) -> Place:
        """A city other than `place`, with the call that finds its coordinates."""
        found = self.rng.choice([c for c in CITIES if c not in (place, self.situation.home)])
        why = f"I also need the coordinates of {found.name}."
        self.calls.append((why, "get_latitude_longitude", {"name": found.name}))
        return found

    def past(self, kind: str, place: Place, first: date, last: date) -> list[Day]:
        return self._report(f"get_historical_{kind}", place, first, last)

    def coming(self, kind: str, place: Place, first: date, last: date) -> list[Day]:
        return self._report(f"get_{kind}_forecast", place, first, last)

    def now(self, kind: str, place: Place) -> Day:
        arguments = {**_at(place), "current_date": self.today.isoformat()}
        self.calls.append((f"Now I look up {place.name}.", f"get_current_{kind}", arguments))
        return weather(place.latitude, place.longitude, self.today)

    def _report(self, tool: str, place: Place, first: date, last: date) -> list[Day]:
        span = {"start_date": first.isoformat(), "end_date": last.isoformat()}
        self.calls.append((f"Now I look up {place.name}.", tool, {**_at(place), **span}))
        return [weather(place.latitude, place.longitude, day) for day in days(first, last)]

    def last_days(self) -> tuple[int, date, date]:
        """(count, first, last) of some days before today."""
        count = self.rng.randint(2, 10)
        return count, self.today - timedelta(count), self.today - timedelta(1)

    def next_days(self) -> tuple[int, date, date]:
        count = self.rng.randint(2, 7)
        return count, self.today + timedelta(1), self.today + timedelta(count)


def yesterday_mean(draw: _Draw) -> Question | None:
    draw.knows_date()
    place = draw.place(home=True)
    day = draw.today - timedelta(1)
    found = draw.past("temp", place, day, day)
    return draw.ask(
        "What was the average temperature in Celsius yesterday where I am?"
        " Please give me a number as an answer.",
        found[0].mean,
    )


def tomorrow_extreme(draw: _Draw) -> Question | None:
    draw.knows_date()
    place = draw.place()
    day = draw.today + timedelta(1)
    found = draw.coming("temp", place, day, day)[0]
    word, value = draw.rng.choice([("highest", found.high), ("lowest", found.low)])
    return draw.ask(
        f"What will be the {word} temperature in Celsius in {place.name} tomorrow?"
        " Please give me a number as an answer.",
        value,
    )


def rain_total(draw: _Draw) -> Question | None:
    draw.knows_date()
    place = draw.place()
    count, first, last = draw.last_days()
    total = sum(day.rain for day in draw.past("rain", place, first, last))
    return draw.ask(
        f"How many millimetres of rain fell in {place.name} over the last {count} days, today not"
        " included? Please give me a number as an answer.",
        round(total, 1),
    )


def rainy_days(draw: _Draw) -> Question | None:
    draw.knows_date()
    place = draw.place()
    count, first, last = draw.last_days()
    wet = sum(day.rain > 0 for day in draw.past("rain", place, first, last))
    return draw.ask(
        f"On how many of the last {count} days, today not included, did it rain in {place.name}?"
        " Please give me a number as an answer.",
        float(wet),
    )


def snow_ahead(draw: _Draw) -> Question | None:
    draw.knows_date()
    place = draw.place()
    count, first, last = draw.next_days()
    total = sum(day.snow for day in draw.coming("snow", place, first, last))
    if total == 0 and draw.rng.random() < 0.8:
        return None
    return draw.ask(
        f"How many centimetres of snow are expected in {place.name} over the next {count} days,"
        " from tomorrow on? Please give me a number as an answer.",
        round(total, 1),
    )


def rain_tomorrow(draw: _Draw) -> Question | None:
    draw.knows_date()
    place = draw.place(home=True)
    day = draw.today + timedelta(1)
    rain = draw.coming("rain", place, day, day)[0].rain
    return draw.ask(
        "Will it rain tomorrow where I am? Answer with 'Yes' or 'No'.", "Yes" if rain > 0 else "No"
    )


def warmer_than_last_year(draw: _Draw) -> Question | None:
    draw.knows_date()
    place = draw.place()
    then = draw.today - timedelta(365)
    now = draw.now("temp", place).mean
    before = draw.past("temp", place, then, then)[0].mean
    if now == before:
        return None
    return draw.ask(
        f"Is today's average temperature in {place.name} higher than that of the same date last"
        " year? Answer with 'Yes' or 'No'.",
        "Yes" if now > before else "No",
    )


def difference_between_cities(draw: _Draw) -> Question | None:
    draw.knows_date()
    first = draw.place()
    second = draw.other(first)
    day = draw.today + timedelta(1)
    high = draw.coming("temp", first, day, day)[0].high
    low = draw.coming("temp", second, day, day)[0].low
    return draw.ask(
        f"What is tomorrow's highest temperature in {first.name} minus tomorrow's lowest"
        f" temperature in {second.name}? Please give me a number as an answer.",
        round(high - low, 1),
    )


def elevation_difference(draw: _Draw) -> Question | None:
    home = draw.place(home=True)
    there = draw.place()
    for place in (home, there):
        draw.calls.append((f"How high is {place.name}?", "get_elevation", _at(place)))
    if home.elevation == there.elevation:
        return None
    return draw.ask(
        f"How many metres higher or lower is {there.name} than where I am? Please give me the"
        " difference as a positive number.",
        abs(home.elevation - there.elevation),
    )


def distance_between(draw: _Draw) -> Question | None:
    first = draw.place()
    second = draw.other(first)
    arguments = {
        "latitude1": first.latitude,
        "longitude1": first.longitude,
        "latitude2": second.latitude,
        "longitude2": second.longitude,
    }
    draw.calls.append(("Now I can ask for the distance.", "get_distance", arguments))
    return draw.ask(
        f"How many kilometres is it from {first.name} to {second.name}?"
        " Please give me a number as an answer.",
        distance((first.latitude, first.longitude), (second.latitude, second.longitude)),
    )


def air_level(draw: _Draw) -> Question | None:
    draw.knows_date()
    place = draw.place()
    index = draw.now("air_quality_index", place).air_quality
    draw.calls.append(
        ("Which level is that?", "get_air_quality_level", {"air_quality_index": index})
    )
    return draw.ask(
        f"What is the air quality level in {place.name} today? Answer with 'good', 'fair',"
        " 'moderate', 'poor', 'very poor' or 'extremely poor'.",
        air_quality_level(index),
    )


def rain_and_snow(draw: _Draw) -> Question | None:
    draw.knows_date()
    place = draw.place()
    count, first, last = draw.last_days()
    rain = sum(day.rain for day in draw.past("rain", place, first, last))
    snow = sum(day.snow for day in draw.past("snow", place, first, last))
    return draw.ask(
        f"How many millimetres of rain and how many centimetres of snow fell in {place.name} over"
        f" the last {count} days, today not included? Please give me a list of two numbers.",
        [round(rain, 1), round(snow, 1)],
    )


def coldest_day(draw: _Draw) -> Question | None:
    draw.knows_date()
    place = draw.place()
    count, first, last = draw.last_days()
    lows = [day.low for day in draw.past("temp", place, first, last)]
    if lows.count(min(lows)) > 1:
        return None
    coldest = first + timedelta(lows.index(min(lows)))
    return draw.ask(
        f"Which of the last {count} days, today not included, had the lowest temperature in"
        f" {place.name}? Please give me a date in the form YYYY-MM-DD.",
        coldest.isoformat(),
    )


def cleaner_air(draw: _Draw) -> Question | None:
    draw.knows_date()
    first = draw.place()
    second = draw.other(first)
    one = draw.now("air_quality_index", first).air_quality
    other = draw.now("air_quality_index", second).air_quality
    if one == other:
        return None
    return draw.ask(
        f"Which city has the lower air quality index today, {first.name} or {second.name}?"
        " Answer with the name of the city.",
        (first if one < other else second).name,
    )


TEMPLATES: tuple[Callable[[_Draw], Question | None], ...] = (
    yesterday_mean,
    tomorrow_extreme,
    rain_total,
    rainy_days,
    snow_ahead,
    rain_tomorrow,
    warmer_than_last_year,
    difference_between_cities,
    elevation_difference,
    distance_between,
    air_level,
    rain_and_snow,
    coldest_day,
    cleaner_air,
)


def _at(place: Place) -> dict[str, Any]:
    return {"latitude": place.latitude, "longitude": place.longitude}


def grade(right: Answer, given: Any) -> float:
    """The share of the answer that is right, 0 to 1. Numbers may differ by rounding."""
    if isinstance(right, list):
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != len(right):
            return 0.0
        return sum(grade(one, other) for one, other in zip(right, given, strict=True)) / len(right)
    if isinstance(right, str):
        return float(str(given).strip().strip(".").lower() == right.lower())
    return float(any(abs(value - right) <= 0.051 for value in _number(given)))


def _number(given: Any) -> Iterator[float]:
    """`given` as a number, if it is one or a string of one."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return
    try:
        yield float(given)
    except (ValueError, OverflowError):
        return

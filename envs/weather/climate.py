"""Invented weather for any coordinates and day, the same on every machine.

The climate follows from latitude, elevation and season by plain arithmetic, without sines or
powers, whose last digits differ between machines. The weather of a day adds a hash of place and
day.
"""

import hashlib
from dataclasses import dataclass
from datetime import date

from envs.weather.places import nearest


@dataclass(frozen=True)
class Day:
    """One day at one place: degrees Celsius, millimetres of rain, centimetres of snow, PM2.5."""

    high: float
    low: float
    mean: float
    rain: float
    snow: float
    air_quality: float


def weather(latitude: float, longitude: float, day: date) -> Day:
    """The weather of one day at the coordinates, to a hundredth of a degree."""
    latitude, longitude = round(latitude, 2), round(longitude, 2)
    place = f"{latitude:.2f} {longitude:.2f}"
    mean = _climate(latitude, longitude, day) + 8 * (_chance(place, day, "mean") - 0.5)
    # Part of the weather lasts for a few days.
    mean += 8 * (_chance(place, date.fromordinal(day.toordinal() // 4 * 4 + 1), "spell") - 0.5)
    spread = 3 + 4 * _chance(place, day, "spread")
    wet = 0.0
    wetness = 0.15 + 0.35 * _chance(place, date(2000, 1, 1), "wetness")
    if _chance(place, day, "wet") < wetness:
        amount = _chance(place, day, "amount")
        wet = 0.1 + 24 * amount * amount * amount
    snows = mean < 1.0
    dust = _chance(place, day, "air")
    return Day(
        high=round(mean + spread, 1),
        low=round(mean - spread, 1),
        mean=round(mean, 1),
        rain=0.0 if snows else round(wet, 1),
        snow=round(wet * 0.8, 1) if snows else 0.0,
        air_quality=round(4 + 110 * dust * dust, 1),
    )


def elevation(latitude: float, longitude: float) -> float:
    """The elevation of the nearest known place in metres."""
    return nearest(latitude, longitude).elevation


def _climate(latitude: float, longitude: float, day: date) -> float:
    """The average mean temperature of the day of the year."""
    start = date(day.year, 1, 15).toordinal()
    phase = ((day.toordinal() - start) % 365) / 365
    # From -1 in mid January to 1 in mid July and back, along parabolas.
    half = 4 * phase - 1 if phase < 0.5 else 3 - 4 * phase
    season = half * (2 - abs(half))
    north = abs(latitude)
    swing = min(18.0, north * 0.3)
    level = 28 - 0.0065 * north * north - elevation(latitude, longitude) * 0.004
    return level + (season if latitude >= 0 else -season) * swing


def _chance(place: str, day: date, what: str) -> float:
    """A pseudo-random number in [0, 1) that depends only on the arguments."""
    digest = hashlib.blake2b(f"{place} {day.isoformat()} {what}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48

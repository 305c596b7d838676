"""Learning curves as SVG files, which a Markdown page can show.

A picture has one row of panels per measure and one legend. Browsers draw it on the background of
the page that shows it, so text and lines have a medium brightness that is readable on white and on
black, and nothing depends on fonts or scripts.
"""

import dataclasses
import math
from collections.abc import Sequence
from html import escape

# Contrast of at least 3 (lines) and 4.3 (text) with #ffffff and with #0d1117.
_COLOURS = ("#3b82c4", "#d2691e", "#2f9e62", "#a35fc4", "#d04848", "#8c7a1f", "#1f9c9c", "#c4538f")
_TEXT = "#797979"
_DASHES = ("", "7 3", "2 3", "7 3 2 3")  # of the lines after each round of colours
_WIDTH, _PANEL_HEIGHT, _LINE = 760, 250, 20
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 86, 30, 40  # margins of a panel


@dataclasses.dataclass(frozen=True)
class Curve:
    """A mean with its range over runs; `number` selects the colour and the line of the legend."""

    number: int
    steps: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Panel:
    """`levels` are horizontal lines with their names, such as the oracle."""

    title: str
    curves: Sequence[Curve]
    levels: Sequence[tuple[str, float]] = ()


def picture(rows: Sequence[Sequence[Panel]], legend: Sequence[str]) -> str:
    """The SVG text; `legend` has the labels of curves 0, 1, …"""
    height = len(rows) * _PANEL_HEIGHT + len(legend) * _LINE + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12" '
        f'fill="{_TEXT}">'
    ]
    for number, row in enumerate(rows):
        width = _WIDTH / len(row)
        for column, panel in enumerate(row):
            parts.append(f'<g transform="translate({column * width:g} {number * _PANEL_HEIGHT})">')
            parts += [*_panel(panel, width), "</g>"]
    for number, label in enumerate(legend):
        y = len(rows) * _PANEL_HEIGHT + number * _LINE + 10
        parts.append(f'<path d="M{_LEFT} {y}h28" {_stroke(number)}/>')
        parts.append(_text(_LEFT + 36, y + 4, label))
    return "\n".join([*parts, "</svg>\n"])


def _stroke(number: int) -> str:
    dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{_colour(number)}" stroke-width="2"{dashed}'


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _text(x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _panel(panel: Panel, width: float) -> list[str]:
    right, bottom = width - _RIGHT, _PANEL_HEIGHT - _BOTTOM
    values = [x for curve in panel.curves for x in (*curve.low, *curve.high)]
    values += [value for _, value in panel.levels]
    low, high = min([0.0, *values]), max([1.0, *values])
    steps = [step for curve in panel.curves for step in curve.steps]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    x = lambda step: _LEFT + (step - first) / (last - first) * (right - _LEFT)
    y = lambda value: bottom - (value - low) / (high - low) * (bottom - _TOP)
    line = lambda value, style: f'<path d="M{_LEFT} {y(value):.1f}H{right:.1f}" {style}/>'

    parts = [_text(_LEFT, 18, panel.title, bold=True)]
    for value in ticks(low, high, 5):
        parts.append(line(value, f'stroke="{_TEXT}" stroke-opacity="0.3"'))
        parts.append(_text(_LEFT - 6, y(value) + 4, f"{value:.4g}", "end"))
    for step in ticks(first, last, 5):
        if step == int(step):
            parts.append(_text(x(step), bottom + 16, f"{step:.0f}", "middle"))
    parts.append(_text((_LEFT + right) / 2, bottom + 32, "updates", "middle"))
    for at, name, value in _apart([(y(value), name, value) for name, value in panel.levels]):
        parts.append(line(value, f'stroke="{_TEXT}" stroke-dasharray="4 4"'))
        parts.append(_text(right + 4, at + 4, f"{name} {value:.2f}"))
    for curve in panel.curves:
        colour = _colour(curve.number)
        points = lambda values, curve=curve: [
            f"{x(step):.1f} {y(value):.1f}" for step, value in zip(curve.steps, values, strict=True)
        ]
        if curve.low != curve.high:
            around = "L".join([*points(curve.high), *reversed(points(curve.low))])
            parts.append(f'<path d="M{around}Z" fill="{colour}" fill-opacity="0.2"/>')
        mean = points(curve.mean)
        parts.append(f'<path d="M{"L".join(mean)}" {_stroke(curve.number)}/>')
        for point in mean if len(mean) < 30 else ():
            cx, cy = point.split()
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{colour}"/>')
    return parts


def _apart(labels: list[tuple[float, str, float]]) -> list[tuple[float, str, float]]:
    """Moves labels down that would overlap the one above them."""
    placed: list[tuple[float, str, float]] = []
    for at, name, value in sorted(labels):
        placed.append((max(at, placed[-1][0] + 13) if placed else at, name, value))
    return placed


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from low to high."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    start, stop = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(start, stop + 1)]

"""Types and limits of setting values, and the error that a wrong configuration raises."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from manus_jax.errors import UserError
from manus_jax.limits import Range, path_problem, shown, text_problem, url_problem

_MAX_ITEMS = 10_000
_TEXT_CHECKS = {"text": text_problem, "path": path_problem, "url": url_problem}


class ConfigError(UserError, ValueError):
    """A wrong configuration; the message is one line that says what to do."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError if the condition does not hold."""
    if not condition:
        raise ConfigError(message)


def checked_value(cls: Any, field: "dataclasses.Field[Any]", value: Any) -> Any:
    """The value of a field of a settings class; ConfigError if it is not valid.

    Checks its type, its range, and that texts can be what they mean. Lists become tuples, and whole
    numbers floats, where the type says so.
    """
    hint = _hints(cls)[field.name]
    value = _converted(value, hint)
    label = f"{cls.gin_name}.{field.name} = {shown(value)}"
    if not _matches(value, hint):
        raise ConfigError(f"{label} is not {_describe(hint)}")
    if value == "" and field.default == "":
        return value
    for item in _items(value):
        if problem := _problem(item, field.metadata):
            item_label = label if item is value else f"{label}: {shown(item)}"
            raise ConfigError(f"{item_label} {problem}")
    if isinstance(value, tuple | dict) and len(value) > _MAX_ITEMS:
        raise ConfigError(f"{label} has {len(value)} items, more than {_MAX_ITEMS}")
    if field.metadata.get("distinct") and isinstance(value, tuple):
        twice = next((item for item in value if value.count(item) > 1), None)
        require(twice is None, f"{label} names {shown(twice)} twice")
    return value


_hints = functools.cache(typing.get_type_hints)


def _problem(value: Any, metadata: Mapping[str, Any]) -> str | None:
    if isinstance(value, str):
        if not value:
            return "is empty"
        return _TEXT_CHECKS[metadata.get("text", "text")](value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return metadata.get("range", Range()).problem(value)
    return None


def _items(value: Any) -> Iterator[Any]:
    """The value, or the values within a list or a dict."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, list | tuple):
        yield value
        return
    for item in value:
        yield from _items(item)


def _converted(value: Any, hint: Any) -> Any:
    """The value with tuples for lists, and floats for whole numbers, where the type says so."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in args:
            if _matches(converted := _converted(value, option), option):
                return converted
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_converted(item, args[0]) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: _converted(item, args[1]) for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**1000 else math.inf
    return value


def _matches(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, a) for a in args)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(_matches(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _matches(k, args[0]) and _matches(v, args[1]) for k, v in value.items()
        )
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _describe(hint: Any) -> str:
    """The type of a setting in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_describe, args))
    if origin is tuple:
        return f"a list, each item {_describe(args[0])}"
    if origin is dict:
        values = "" if args[1] is Any else f", each value {_describe(args[1])}"
        return f"a dict with strings as keys{values}"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}
    return names.get(hint, "None")

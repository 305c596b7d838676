"""gin bindings into frozen, validated dataclasses, with every error found before any work starts.

A command names the settings it reads; `load` parses the files and `--gin_param`s, builds those
dataclasses, and refuses what gin itself lets pass: values of the wrong type, bindings for settings
that this command never reads, macros nobody refers to. What was read is the operative config.
"""

import argparse
import dataclasses
import difflib
import io
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import gin

from manus_jax.errors import UserError

T = TypeVar("T")
_REGISTRY: dict[str, Any] = {}
_INCLUDE = re.compile(r"""include\s+(["'])(?P<path>.+)\1\s*(#.*)?""")


class ConfigError(UserError, ValueError):
    """A wrong configuration, in one line that says what to do."""


@typing.dataclass_transform(frozen_default=True)
def settings(name: str) -> Any:
    """Makes a class a frozen dataclass whose fields are the gin bindings `name.field`."""

    def register(cls: type[T]) -> type[T]:
        original = cls.__dict__.get("__post_init__")

        def post_init(self: Any) -> None:
            _check_types(name, self)
            if original is not None:
                original(self)

        cls.__post_init__ = post_init  # type: ignore[attr-defined]
        frozen = dataclasses.dataclass(frozen=True)(cls)
        frozen.gin_name = name  # type: ignore[attr-defined]
        _REGISTRY[name] = gin.external_configurable(frozen, name=name)
        return frozen

    return register


def _check_types(name: str, value: Any) -> None:
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if isinstance(given, list):
            given = tuple(given)
            object.__setattr__(value, field.name, given)
        hint = hints[field.name]
        if hint is float and isinstance(given, int) and not isinstance(given, bool):
            object.__setattr__(value, field.name, float(given))
        elif not _matches(given, hint):
            raise ConfigError(f"{name}.{field.name} = {given!r} is not {_describe(hint)}")


def _matches(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, a) for a in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        inner = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        return len(inner) == len(value) and all(map(_matches, value, inner))
    if origin is dict:
        return isinstance(value, dict) and all(
            _matches(k, args[0]) and _matches(v, args[1]) for k, v in value.items()
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    return {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}.get(
        hint, str(hint).replace("typing.", "")
    )


def argument_parser(command: str, description: str) -> argparse.ArgumentParser:
    """The flags that every configured command takes."""
    parser = argparse.ArgumentParser(prog=f"python -m manus_jax.{command}", description=description)
    parser.add_argument(
        "--gin_file", action="append", default=[], metavar="FILE", help="may be given several times"
    )
    parser.add_argument(
        "--gin_param",
        action="append",
        default=[],
        metavar="'a.b = c'",
        help="a binding that overrides the files; may be given several times",
    )
    return parser


def parse(files: Sequence[str], params: Sequence[str]) -> None:
    """Reads gin files and bindings, in this order; errors are one line.

    An `include "base.gin"` is looked for beside the file that says so.
    """
    gin.clear_config()
    missing = [f for f in files if not Path(f).is_file()]
    if missing:
        raise ConfigError(f"gin file {missing[0]} does not exist")
    bad = [p for p in params if "=" not in p]
    if bad:
        raise ConfigError(f"--gin_param {bad[0]!r} is no binding; write it as 'name.field = value'")
    try:
        for file in files:
            _parse_file(Path(file))
        gin.parse_config_files_and_bindings([], list(params))
    except ConfigError:
        raise
    except (ValueError, SyntaxError, OSError, AttributeError, ImportError) as error:
        raise ConfigError(_explain(error)) from None


class _Lines(io.StringIO):
    """Lines of a file that gin reads and, in its errors, calls by the file's name."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


def _parse_file(path: Path, inside: tuple[Path, ...] = ()) -> None:
    # gin looks for included files from the current directory on, wherever the including one is.
    if path.resolve() in inside:
        raise ConfigError(f"gin file {path} includes itself")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    start = 0
    for number, line in enumerate([*lines, ""]):
        include = _INCLUDE.fullmatch(line.strip())
        if include or number == len(lines):
            gin.parse_config(_Lines(str(path), "\n" * start + "".join(lines[start:number])))
            start = number + 1
        if include:
            included = path.parent / include["path"]
            if not included.is_file():
                raise ConfigError(f"{path} includes {included}, which does not exist")
            _parse_file(included, (*inside, path.resolve()))


def _explain(error: Exception) -> str:
    text = " ".join(str(error).split())
    if found := re.search(r"No bindings specified for '(\w+)/gin.macro'", text):
        return f"macro %{found[1]} is used and never set; add a line '{found[1]} = …'"
    if found := re.search(r"No configurable matching '([\w./]+)'", text):
        return f"unknown setting {found[1]!r}{_suggest(found[1], _REGISTRY)} ({_where(text)})"
    found = re.search(r"Configurable '([\w./]+)' doesn't have a parameter named '(\w+)'", text)
    if found and found[1].split(".")[-1] in _REGISTRY:
        group = found[1].split(".")[-1]
        fields = [f.name for f in dataclasses.fields(_REGISTRY[group])]
        hint = _suggest(found[2], fields)
        return f"unknown setting {group}.{found[2]}{hint}; {group} has {', '.join(fields)}"
    return f"configuration: {text}"


def _where(text: str) -> str:
    return text.split("'. ", 1)[-1]


def _suggest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def build(*classes: type) -> tuple[Any, ...]:
    """Instances of the settings classes with their bindings applied."""
    built = []
    for cls in classes:
        name = cls.gin_name  # type: ignore[attr-defined]
        try:
            built.append(_REGISTRY[name]())
        except ConfigError as error:
            raise ConfigError(str(error).split("\n")[0]) from None
        except (TypeError, ValueError) as error:
            raise ConfigError(_explain(error).replace("__init__()", name)) from None
    return tuple(built)


def refuse_unread(read: Sequence[type]) -> None:
    """Raises when a binding or a macro was given that nothing reads."""
    names = {cls.gin_name for cls in read}  # type: ignore[attr-defined]
    for name in sorted(set(_REGISTRY) - names):
        bound = gin.get_bindings(name, resolve_references=False)
        if bound:
            raise ConfigError(
                f"{name}.{next(iter(bound))} is set, and nothing in this command reads it; "
                f"it reads {', '.join(sorted(names))}"
            )
    text = gin.config_str(max_line_length=10_000)
    for macro in re.findall(r"^([A-Za-z_]\w*) = ", text, flags=re.MULTILINE):
        if not re.search(rf"%{macro}\b", text):
            raise ConfigError(f"macro {macro} is set, and no binding refers to it (%{macro})")


def operative_config() -> str:
    """What was read, with defaults filled in: a gin file that gives the same run again."""
    return gin.operative_config_str(max_line_length=100)

"""gin bindings as frozen, validated dataclasses.

`@settings("name")` makes a class one group of bindings. `parse` reads the gin files and
`--gin_param`s, `build` makes the dataclasses, and errors that gin does not report are found before
any work starts: values of the wrong type or out of range, bindings that the command does not read
(`config.commands`), and unused macros.
"""

import argparse
import dataclasses
import difflib
import io
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import gin

from manus_jax.errors import UserError

T = TypeVar("T")
_REGISTRY: dict[str, Any] = {}
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
}
_INCLUDE = re.compile(r"""include\s+(["'])(?P<path>.+)\1\s*(#.*)?""")


class ConfigError(UserError, ValueError):
    """A wrong configuration; the message is one line that says what to do."""


def setting(
    *,
    default: Any = dataclasses.MISSING,
    factory: Any = dataclasses.MISSING,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    may_change: bool = False,
) -> Any:
    """A field of a settings class, with the range of its values (None is in every range).

    `may_change`: the value may differ when a run is resumed, because it does not affect what is
    learned.
    """
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    metadata = {
        "may_change": may_change,
        "bounds": {text: bound for text, bound in bounds.items() if bound is not None},
    }
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(setting, dataclasses.field))
def settings(name: str, may_change: bool = False, of_engine: bool = False) -> Any:
    """Makes a class a frozen dataclass whose fields are the gin bindings `name.field`.

    `may_change`: all of its values may differ when a run is resumed. `of_engine`: the group belongs
    to an engine, and commands read it only if that engine is chosen.
    """

    def register(cls: type[T]) -> type[T]:
        original = cls.__dict__.get("__post_init__")

        def post_init(self: Any) -> None:
            _check_values(name, self)
            if original is not None:
                original(self)

        cls.__post_init__ = post_init  # type: ignore[attr-defined]
        frozen = dataclasses.dataclass(frozen=True)(cls)
        frozen.gin_name = name  # type: ignore[attr-defined]
        frozen.may_change = may_change  # type: ignore[attr-defined]
        frozen.of_engine = of_engine  # type: ignore[attr-defined]
        _REGISTRY[name] = gin.external_configurable(frozen, name=name)
        return frozen

    return register


def _check_values(name: str, group: Any) -> None:
    """Converts lists to tuples and whole numbers to floats; raises for wrong types and ranges."""
    hints = typing.get_type_hints(type(group))
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if isinstance(value, list):
            value = tuple(value)
        hint = hints[field.name]
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not _matches(value, hint):
            raise ConfigError(f"{name}.{field.name} = {value!r} is not {_describe(hint)}")
        object.__setattr__(group, field.name, value)
        for text, bound in field.metadata.get("bounds", {}).items():
            if value is not None and not _BOUNDS[text](value, bound):
                raise ConfigError(f"{name}.{field.name} = {value!r} must be {text} {bound}")


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
    """A parser with the flags of every configured command."""
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

    The path of an `include "base.gin"` is relative to the including file.
    """
    gin.clear_config()
    missing = [f for f in files if not Path(f).is_file()]
    if missing:
        raise ConfigError(f"gin file {missing[0]} does not exist")
    bad = [p for p in params if "=" not in p]
    if bad:
        raise ConfigError(
            f"--gin_param {bad[0]!r} is not a binding; write it as 'name.field = value'"
        )
    try:
        for file in files:
            _parse_file(Path(file))
        gin.parse_config_files_and_bindings([], list(params))
    except ConfigError:
        raise
    except (ValueError, SyntaxError, OSError, AttributeError, ImportError) as error:
        raise ConfigError(_explain(error)) from None


class _Lines(io.StringIO):
    """Lines of a file, with the name that gin shows in its errors."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


def _parse_file(path: Path, inside: tuple[Path, ...] = ()) -> None:
    # gin itself resolves includes relative to the current directory.
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


def setting_names(*names: str) -> frozenset[str]:
    """The settings `group.field` of the named groups; names of single settings stay as they are."""
    found: set[str] = set()
    for name in names:
        if "." in name:
            found.add(name)
        else:
            found |= {f"{name}.{field.name}" for field in dataclasses.fields(_REGISTRY[name])}
    return frozenset(found)


def engine_groups() -> list[str]:
    """The groups of settings that belong to engines."""
    return [name for name, group in _REGISTRY.items() if group.of_engine]


def find_field(name: str) -> "dataclasses.Field[Any] | None":
    """The dataclass field of a setting `group.field`; None if there is no such setting."""
    group, _, field = name.partition(".")
    fields = dataclasses.fields(_REGISTRY[group]) if group in _REGISTRY else ()
    return next((f for f in fields if f.name == field), None)


def may_change(name: str) -> bool:
    """Whether the setting `group.field` may differ when a run is resumed."""
    field = find_field(name)
    if field is None:
        return False
    group = _REGISTRY[name.partition(".")[0]]
    return group.may_change or field.metadata.get("may_change", False)


def bound_settings() -> list[str]:
    """The settings `group.field` that the parsed files and parameters bind."""
    return [
        f"{group}.{field}"
        for group in sorted(_REGISTRY)
        for field in gin.get_bindings(group, resolve_references=False)
    ]


def refuse_unread(
    reader: str, unread: Callable[[str], bool], readers: Mapping[str, Collection[str]]
) -> None:
    """Raises if a setting is bound that `reader` does not read; the error names the `readers`."""
    for name in filter(unread, bound_settings()):
        others = ", ".join(who for who, read in readers.items() if name in read)
        raise ConfigError(
            f"{name} is set, but {reader} does not read it; it is read by {others or 'nothing'}"
        )


def refuse_unused_macros() -> None:
    """Raises for a macro that no binding refers to."""
    text = gin.config_str(max_line_length=10_000)
    for macro in re.findall(r"^([A-Za-z_]\w*) = ", text, flags=re.MULTILINE):
        if not re.search(rf"%{macro}\b", text):
            raise ConfigError(f"macro {macro} is set, and no binding refers to it (%{macro})")


def import_lines() -> list[str]:
    """The `import` statements of the parsed files."""
    lines = gin.config_str(max_line_length=10_000).splitlines()
    return [line for line in lines if line.startswith(("import ", "from "))]

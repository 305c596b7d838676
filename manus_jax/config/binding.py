"""gin bindings as frozen, validated dataclasses.

`@settings("name")` makes a class one group of bindings. `parse` reads the gin files and
`--gin_param`s, `build` makes the dataclasses, and every mistake is found before any work starts:
values of the wrong type or out of range (`config.values`), bindings that the command does not read
(`config.commands`), and unused macros.
"""

import dataclasses
import difflib
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from manus_jax.config.gin_files import GinText
from manus_jax.config.values import ConfigError as ConfigError
from manus_jax.config.values import checked_value
from manus_jax.config.values import require as require
from manus_jax.limits import Range, path_problem, shown

T = TypeVar("T")
_REGISTRY: dict[str, Any] = {}
_parsed = GinText()


def setting(
    *,
    default: Any = dataclasses.MISSING,
    factory: Any = dataclasses.MISSING,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    text: Literal["text", "path", "url"] = "text",
    distinct: bool = False,
    may_change: bool = False,
) -> Any:
    """A field of a settings class, with the limits of its values (None is always allowed).

    The range holds for a number and for every number in a list. `text` is what strings mean; only
    a setting whose default is the empty string may be empty. `distinct`: a list has no value twice.
    `may_change`: the value may differ when a run is resumed, because it does not affect what is
    learned.
    """
    metadata = {
        "may_change": may_change,
        "range": Range(at_least, above, at_most, below),
        "text": text,
        "distinct": distinct,
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
            for field in dataclasses.fields(self):
                value = checked_value(type(self), field, getattr(self, field.name))
                object.__setattr__(self, field.name, value)
            if original is not None:
                original(self)

        cls.__post_init__ = post_init  # type: ignore[attr-defined]
        frozen = dataclasses.dataclass(frozen=True)(cls)
        frozen.gin_name = name  # type: ignore[attr-defined]
        frozen.may_change = may_change  # type: ignore[attr-defined]
        frozen.of_engine = of_engine  # type: ignore[attr-defined]
        _REGISTRY[name] = frozen
        return frozen

    return register


def changed(group: Any, *names: str) -> list[str]:
    """The settings among `names` whose values are not their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(group)}
    return [name for name in names if getattr(group, name) != defaults[name]]


def parse(files: Sequence[str], params: Sequence[str]) -> None:
    """Reads gin files and bindings, in this order; later values replace earlier ones."""
    global _parsed
    _parsed = GinText()
    for file in files:
        if problem := path_problem(file):
            raise ConfigError(f"gin file {shown(file)} {problem}")
        _parsed.read_file(Path(file).expanduser())
    for param in params:
        _parsed.read_param(param)
    _parsed.run_imports()
    for name, where in _parsed.places.items():
        _refuse_unknown(name, where)
    for name, value in _parsed.resolved().items():
        field = find_field(name)
        assert field is not None
        try:
            checked_value(_REGISTRY[name.partition(".")[0]], field, value)
        except ConfigError as error:
            where = _parsed.places[name]
            in_file = "" if where.startswith("--") else f"{where}: "
            raise ConfigError(f"{in_file}{error}") from None


def _refuse_unknown(name: str, where: str) -> None:
    group, _, field = name.rpartition(".")
    if group not in _REGISTRY:
        raise ConfigError(f"{where}: unknown setting {group!r}{_suggest(group, _REGISTRY)}")
    fields = [f.name for f in dataclasses.fields(_REGISTRY[group])]
    if field not in fields:
        hint = _suggest(field, fields)
        raise ConfigError(f"{where}: unknown setting {name}{hint}; {group} has {', '.join(fields)}")


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def build(*classes: type) -> tuple[Any, ...]:
    """Instances of the settings classes with their bindings applied."""
    bound: dict[str, dict[str, Any]] = {}
    for name, value in _parsed.resolved().items():
        group, _, field = name.partition(".")
        bound.setdefault(group, {})[field] = value
    return tuple(cls(**bound.get(cls.gin_name, {})) for cls in classes)  # type: ignore[attr-defined]


def bound_value(name: str) -> Any:
    """The value that a binding gives to a setting; None if there is no binding."""
    return _parsed.resolved().get(name)


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


def refuse_unread(
    reader: str, unread: Callable[[str], bool], readers: Mapping[str, Collection[str]]
) -> None:
    """Raises if a setting is bound that `reader` does not read; the error names the `readers`."""
    for name in filter(unread, _parsed.places):
        others = ", ".join(who for who, read in readers.items() if name in read)
        raise ConfigError(
            f"{name} is set, but {reader} does not read it; it is read by {others or 'nothing'}"
        )


def refuse_unused_macros() -> None:
    """Raises for a macro that no binding refers to."""
    for macro in _parsed.unused_macros():
        meant = [f"{group}.{macro}" for group in _REGISTRY if find_field(f"{group}.{macro}")]
        hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
        raise ConfigError(f"macro {macro} is set, and no binding refers to it (%{macro}){hint}")


def import_lines() -> list[str]:
    """The `import` statements of the parsed files."""
    return [f"import {module}" for module in _parsed.imports]

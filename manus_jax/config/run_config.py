"""A run's `config.gin`: written from the settings objects, read back when the run is resumed.

The file is runnable: it holds the value of every setting that the command reads, defaults included.
"""

import dataclasses
import pprint
from collections.abc import Collection
from typing import Any

from manus_jax.config.binding import ConfigError, find_field, import_lines, may_change
from manus_jax.config.gin_files import GinText


def config_text(config: Any, read: Collection[str]) -> str:
    """The settings `read` of a config dataclass (see `config.commands`) as gin text."""
    lines = [*import_lines(), ""] if import_lines() else []
    for group in vars(config).values():
        if group is None:
            continue
        for field in dataclasses.fields(group):
            name = f"{group.gin_name}.{field.name}"
            if name in read:
                value = pprint.pformat(_plain(getattr(group, field.name)), width=88)
                lines.append(f"{name} = " + value.replace("\n", "\n    "))
        lines.append("")
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    """The value with lists in place of tuples, as gin reads them back."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def read_bindings(text: str) -> dict[str, Any]:
    """The values of a gin text by `group.field`, without applying them."""
    read = GinText()
    try:
        read.read_text("config.gin", text)
    except ConfigError as error:
        raise ConfigError(f"not a gin config: {error}") from None
    return {name: _plain(value) for name, value in read.resolved().items()}


def changed_settings(old: str, new: str) -> list[str]:
    """What differs between two gin texts and may not change when a run is resumed."""
    before, after = read_bindings(old), read_bindings(new)
    changed = []
    for name in sorted(before.keys() | after.keys()):
        default = default_of(name)
        was, now = before.get(name, default), after.get(name, default)
        if was != now and not may_change(name):
            changed.append(f"{name} was {was!r} and is {now!r}")
    return changed


def default_of(name: str) -> Any:
    """The default of a setting, as `read_bindings` returns values; None if there is no such one."""
    field = find_field(name)
    if field is None:
        return None
    if field.default_factory is not dataclasses.MISSING:
        return _plain(field.default_factory())
    return _plain(field.default)

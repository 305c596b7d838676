"""Reads gin text: bindings, macros, includes and imports.

Only the syntax is gin's. A binding sets a field of a settings class (`config.binding`), so scopes
(`scope/name.field`) and references (`@name`) have no meaning here and are errors. The path of an
`include "base.gin"` is relative to the including file.
"""

import dataclasses
import importlib
import re
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manus_jax.config.values import ConfigError
from manus_jax.limits import shown

_MAX_BYTES = 10**6
_VALUES = "a number, a quoted string, True, False, None, a list, a dict or a %MACRO"


@dataclasses.dataclass(frozen=True)
class _Macro:
    name: str


@dataclasses.dataclass(frozen=True)
class _Reference:
    name: str


class _Delegate:
    """What gin's parser makes of references and macros, as its `ParserDelegate`."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> _Reference:
        return _Reference(scoped_configurable_name)

    def macro(self, macro_name: str) -> _Macro:
        return _Macro(macro_name)


class GinText:
    """What gin files and bindings say. `places` tells where each setting `group.field` is set."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        self.imports: list[str] = []
        self._values: dict[str, Any] = {}
        self._macros: dict[str, Any] = {}

    def read_file(self, path: Path, inside: tuple[Path, ...] = ()) -> None:
        if path.is_fifo() and not path.is_relative_to("/dev/fd"):  # which a shell's <(…) makes
            raise ConfigError(f"gin file {path} is a pipe, not a file")
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
            text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        except FileNotFoundError:
            missing = f"{inside[-1]} includes {path}, which" if inside else f"gin file {path}"
            raise ConfigError(f"{missing} does not exist") from None
        except OSError as error:
            raise ConfigError(f"gin file {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"gin file {path} is not a text file: {error.reason}") from None
        if path.resolve() in inside:
            raise ConfigError(f"gin file {path} includes itself")
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"gin file {path} has more than {_MAX_BYTES} bytes")
        outer = (*inside, path.resolve())
        include = lambda name: self.read_file(path.parent / name, outer)
        if not self.read_text(str(path), text, include):
            raise ConfigError(f"gin file {path} is empty: it sets nothing")

    def read_param(self, param: str) -> None:
        """Reads bindings from the command line."""
        where = f"--gin_param {shown(param)}"
        if "=" not in param:
            raise ConfigError(f"{where} is not a binding; write it as 'name.field = value'")
        self.read_text(where, param)

    def read_text(
        self, source: str, text: str, include: Callable[[str], None] | None = None
    ) -> int:
        """Reads a text and returns the number of its statements.

        `source` is its name in errors, `include` reads the files that it includes.
        """
        # Not at the top: settings are also used where only vLLM is installed, without gin.
        from gin import config_parser

        count = 0
        try:
            for statement in config_parser.ConfigParser(text, _Delegate()):
                count += 1
                where = source
                if not source.startswith("--"):
                    where = f"{source}, line {statement.location.line_num}"
                if isinstance(statement, config_parser.BindingStatement):
                    self._bind(where, statement)
                elif isinstance(statement, config_parser.ImportStatement):
                    self.imports.append(statement.module)
                elif isinstance(statement, config_parser.IncludeStatement):
                    if include is None:
                        raise ConfigError(f"{where}: include is only possible in gin files")
                    include(statement.filename)
        except SyntaxError as error:
            line = "" if source.startswith("--") else f", line {error.lineno}"
            raise ConfigError(f"{source}{line}: {_explain(error.msg)}") from None
        except tokenize.TokenError:
            raise ConfigError(f"{source}: a bracket or a string is not closed") from None
        except (RecursionError, MemoryError):
            raise ConfigError(f"{source}: a value is nested too deeply") from None
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{source}: {' '.join(str(error).split())[:200]}") from None
        return count

    def _bind(self, where: str, statement: Any) -> None:
        if statement.scope:
            raise ConfigError(f"{where}: {statement.scope}/ is a scope, and settings have none")
        if statement.arg_name:
            name = f"{statement.selector}.{statement.arg_name}"
            self.places[name], self._values[name] = where, statement.value
        else:
            self._macros[statement.selector] = statement.value

    def run_imports(self) -> None:
        """Imports the modules that the files import, which register components."""
        for module in self.imports:
            try:
                importlib.import_module(module)
            except (Exception, SystemExit) as error:  # whatever the user's module raises
                raise ConfigError(f"import {module}: {type(error).__name__}: {error}") from error

    def resolved(self) -> dict[str, Any]:
        """The values by `group.field`, with macros replaced by their values."""
        return {name: self._resolve(value) for name, value in self._values.items()}

    def _resolve(self, value: Any, inside: tuple[str, ...] = ()) -> Any:
        if isinstance(value, _Macro):
            name = value.name
            if name in inside:
                raise ConfigError(f"macro %{name} refers to itself")
            if name not in self._macros:
                raise ConfigError(f"macro %{name} is used and never set; add a line '{name} = …'")
            return self._resolve(self._macros[name], (*inside, name))
        if isinstance(value, _Reference):
            raise ConfigError(f"@{value.name} is not a value: write {_VALUES}")
        if isinstance(value, list | tuple):
            return type(value)(self._resolve(item, inside) for item in value)
        if isinstance(value, dict):
            return {key: self._resolve(item, inside) for key, item in value.items()}
        return value

    def unused_macros(self) -> list[str]:
        """The macros that no binding refers to, directly or through other macros."""
        used: set[str] = set()

        def visit(value: Any) -> None:
            if isinstance(value, _Macro) and value.name not in used:
                used.add(value.name)
                visit(self._macros.get(value.name))
            elif isinstance(value, list | tuple):
                for item in value:
                    visit(item)
            elif isinstance(value, dict):
                visit(list(value.values()))

        visit(self._values)
        return [name for name in self._macros if name not in used]


def _explain(message: str) -> str:
    """A syntax error of gin's parser in one line."""
    if found := re.search(r"Failed to parse token '(.*)'", message, re.DOTALL):
        return f"{shown(found[1])} is not a value: write {_VALUES}"
    if message.startswith("Expected newline"):
        return "the line must end after the value; expressions are not evaluated"
    return " ".join(message.split())[:200]

"""Tools: the actions of an environment as functions that a model can call.

The prompt file of an environment declares its tools (`[tools.NAME]`). Where the server's actions
are function calls anyway, the file has only the types of their parameters, `[parameters]`. A tool
converts the arguments of a call to the action that the server reads, and such an action back to
arguments, so that examples and oracles need not be written twice. An environment without tools of
its own has one, `act`, whose argument is the action.
"""

import ast
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_SERVER_FORM = re.compile(r"\s*(?:Action:\s*)?(\w+) with Action Input:(.*)", re.DOTALL)
_FIELD = re.compile(r"\{(\w+)\}")
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str, int, float),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "any": (object,),
}


class ToolUseError(ValueError):
    """A call that its tool does not accept; the message is meant for the model."""


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that a model can call.

    `parameters` maps names to "type" or "type: description", or to a list of allowed values; a name
    that ends with "?" is optional. `action` is the server's action with the arguments in braces, as
    in "move {direction}"; None for servers that take "Action: NAME with Action Input: {...}".
    """

    name: str
    description: str
    parameters: Mapping[str, str | Sequence[str]]
    action: str | None = None

    def __post_init__(self) -> None:
        for kind in self.parameters.values():
            if isinstance(kind, str) and kind.partition(":")[0] not in _TYPES:
                raise ValueError(f"tool {self.name}: {kind!r} is none of the types {[*_TYPES]}")
        if self.action is not None and {*_FIELD.findall(self.action)} != {*self.parameters}:
            raise ValueError(f"tool {self.name}: {self.action!r} must use every parameter")

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(name.rstrip('?') for name in self.parameters)})"

    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's form, as chat templates expect it."""
        properties: dict[str, Any] = {}
        for name, kind in self.parameters.items():
            if not isinstance(kind, str):
                properties[name.rstrip("?")] = {"type": "string", "enum": list(kind)}
                continue
            kind, _, about = kind.partition(": ")
            shown = {} if kind == "any" else {"type": kind}
            properties[name.rstrip("?")] = shown | ({"description": about} if about else {})
        required = [name for name in self.parameters if not name.endswith("?")]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}

    def command(self, arguments: Mapping[str, Any]) -> str:
        """The action for the server; ToolUseError if the arguments do not fit the parameters."""
        self._check(arguments)
        if self.action is None:
            # The servers evaluate a Python literal.
            return f"Action: {self.name} with Action Input: {dict(arguments)!r}"
        return _FIELD.sub(lambda field: str(arguments[field[1]]), self.action)

    def arguments(self, command: str) -> dict[str, Any] | None:
        """The arguments of the call that gives this action; None if it is not one of this tool."""
        if self.action is None:
            found = _SERVER_FORM.fullmatch(command)
            if found is None or found[1] != self.name:
                return None
            try:
                return json.loads(found[2])
            except ValueError:
                return ast.literal_eval(found[2].strip())
        parts = _FIELD.split(self.action)  # text, name, text, name, …, text
        pattern = "".join(
            f"(?P<{part}>.+?)" if index % 2 else re.escape(part) for index, part in enumerate(parts)
        )
        found = re.fullmatch(pattern, command.strip(), re.DOTALL)
        if found is None:
            return None
        given = {name: self._value(name, text) for name, text in found.groupdict().items()}
        try:
            self._check(given)
        except ToolUseError:
            return None
        return given

    def _value(self, name: str, text: str) -> Any:
        whole = self.parameters[name] in ("integer", "number") or str(
            self.parameters[name]
        ).startswith(("integer:", "number:"))
        return int(text) if whole and text.isdecimal() else text

    def _check(self, arguments: Mapping[str, Any]) -> None:
        names = {name.rstrip("?"): kind for name, kind in self.parameters.items()}
        for name in arguments:
            if name not in names:
                raise ToolUseError(f"{self.signature} has no argument {str(name)[:80]!r}.")
        for name in self.parameters:
            if not name.endswith("?") and name not in arguments:
                raise ToolUseError(f"{self.signature} needs the argument {name!r}.")
        for name, value in arguments.items():
            kind = names[name]
            if not isinstance(kind, str):
                if value not in kind:
                    raise ToolUseError(f"{name!r} of {self.signature} is one of {', '.join(kind)}.")
                continue
            wanted = kind.partition(":")[0]
            fits = isinstance(value, _TYPES[wanted])
            if not fits or (isinstance(value, bool) and wanted not in ("boolean", "any")):
                raise ToolUseError(f"{name!r} of {self.signature} must be of type {wanted}.")


ACT = Tool(
    "act",
    "Carries out one action in the environment.",
    {"command": "string: the action"},
    "{command}",
)
"""The tool of environments that have no tools of their own."""


def read_tools(fields: Mapping[str, Any]) -> tuple[Tool, ...]:
    """The tools of a prompt file: those of `[tools.NAME]`, or its actions with `[parameters]`."""
    if "parameters" in fields:
        return tuple(
            tool for line in fields["actions"] for tool in _listed(line, fields["parameters"])
        )
    declared = fields.get("tools", {})
    return tuple(Tool(name, **{"parameters": {}, **about}) for name, about in declared.items())


def tool_from_schema(name: str, description: str, schema: Mapping[str, Any]) -> Tool:
    """A tool whose parameters are given as a JSON schema; types without a name here are "any"."""
    required, parameters = schema.get("required", ()), {}
    for key, about in schema.get("properties", {}).items():
        kind = about.get("type")
        kind = kind if isinstance(kind, str) and kind in _TYPES else "any"
        if about.get("description"):
            kind += f": {about['description']}"
        values = about.get("enum", ())
        listed = values and all(isinstance(value, str) for value in values)
        parameters[key if key in required else f"{key}?"] = tuple(values) if listed else kind
    return Tool(name, description, parameters)


def _listed(line: str, types: Mapping[str, str]) -> list[Tool]:
    """The tools in a line like "get_cast, get_crew(movie_id): who made a movie"."""
    heads, _, about = line.strip().partition("): ")
    tools: list[Tool] = []
    waiting: list[str] = []  # names whose parameters follow another name
    for name, given in re.findall(r"(\w+)(\([^)]*\)?)?(?:, |$)", heads):
        waiting.append(name)
        if not given:
            continue
        names = re.findall(r"\w+", given)
        kinds = {n + "?" * types[n].endswith("?"): types[n].rstrip("?") for n in names}
        tools += [Tool(n, about or n.replace("_", " "), kinds) for n in waiting]
        waiting = []
    return tools

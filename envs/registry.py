"""The environments by name. A new one is a folder with a SPEC, and a line here.

Modules are imported only when their environment is asked for, so a missing extra hurts nobody else.
"""

import importlib

from envs.game import EnvironmentSpec

ENVIRONMENTS = {
    "babyai": "envs.babyai:SPEC",
    "maze": "envs.maze:SPEC",
    "sciworld": "envs.sciworld:SPEC",
    "sqlgym": "envs.sqlgym:SPEC",
    "textcraft": "envs.textcraft:SPEC",
    "weather": "envs.weather:SPEC",
    "webshop": "envs.webshop:SPEC",
    "wordle": "envs.wordle:SPEC",
}


class UnknownEnvironment(Exception):
    """No environment of that name is registered."""


def load(name: str) -> EnvironmentSpec:
    """The spec registered under `name`; the message of the error lists the names there are."""
    if name not in ENVIRONMENTS:
        raise UnknownEnvironment(
            f"unknown environment {name!r}; there are: {', '.join(sorted(ENVIRONMENTS))}"
        )
    module, _, attribute = ENVIRONMENTS[name].partition(":")
    spec: EnvironmentSpec = getattr(importlib.import_module(module), attribute)
    return spec

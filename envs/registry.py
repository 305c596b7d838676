"""The environments by name. A new one is a folder with a SPEC, and a line here.

Modules are imported only when their environment is asked for, so a missing extra hurts nobody else.
One that lives elsewhere is named by its place, `my_package.my_env:SPEC`.
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
    """The spec of a registered name or of a place; the error lists the names there are."""
    place = name if ":" in name else ENVIRONMENTS.get(name)
    if place is None:
        raise UnknownEnvironment(
            f"unknown environment {name!r}; there are: {', '.join(sorted(ENVIRONMENTS))}"
        )
    module, _, attribute = place.partition(":")
    try:
        spec = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise UnknownEnvironment(
            f"no module {error.name!r} for the environment {place!r}; is it on the Python path?"
        ) from None
    if not isinstance(spec, EnvironmentSpec):
        raise UnknownEnvironment(f"the module {module!r} has no EnvironmentSpec {attribute!r}")
    return spec

"""The environments by name. To add one, create a folder with a SPEC and add a line here.

A module is imported only when its environment is requested, so a missing extra affects only that
environment. An environment outside this package is named by its location, `my_package.my_env:SPEC`,
or adapted (`envs.adapters`).
"""

import importlib

from envs.game import EnvironmentSpec

ENVIRONMENTS = {
    "alfworld": "envs.alfworld:SPEC",
    "babyai": "envs.babyai:SPEC",
    "maze": "envs.maze:SPEC",
    "sciworld": "envs.sciworld:SPEC",
    "sqlgym": "envs.sqlgym:SPEC",
    "textcraft": "envs.textcraft:SPEC",
    "weather": "envs.weather:SPEC",
    "webshop": "envs.webshop:SPEC",
    "wordle": "envs.wordle:SPEC",
}

ADAPTERS = {
    "gym": "envs.adapters.gym",
    "mcp": "envs.adapters.mcp",
    "openenv": "envs.adapters.openenv",
    "verifiers": "envs.adapters.verifiers",
}
"""Modules with a function `adapted`, by the prefix of the names for it (see `envs.adapters`)."""


class UnknownEnvironment(Exception):
    """No environment with that name or location."""


def load(name: str) -> EnvironmentSpec:
    """The spec of a registered name, of an adapter's or of a location "module:SPEC"."""
    prefix, _, adapted = name.partition(":")
    if prefix in ADAPTERS:
        if not adapted.strip():
            raise UnknownEnvironment(f"{name!r} names no environment: write {prefix}:NAME")
        return importlib.import_module(ADAPTERS[prefix]).adapted(adapted)
    location = name if ":" in name else ENVIRONMENTS.get(name, "")
    module, _, attribute = location.partition(":")
    if not (module and attribute) or module.startswith("."):
        raise UnknownEnvironment(
            f"unknown environment {name!r}; there are: {', '.join(sorted(ENVIRONMENTS))}"
        )
    try:
        spec = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise UnknownEnvironment(
                f"no module {error.name!r} for the environment {location!r}; is it on the Python "
                "path?"
            ) from None
        raise UnknownEnvironment(f"{location} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the module raises
        reason = f"{type(error).__name__}: {error}"
        raise UnknownEnvironment(f"{location} cannot be imported: {reason}") from error
    if not isinstance(spec, EnvironmentSpec):
        raise UnknownEnvironment(f"the module {module!r} has no EnvironmentSpec {attribute!r}")
    return spec

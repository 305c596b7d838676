"""Named components: rewards, action formats, advantages, losses, engines and the like.

Each kind of component has one `Registry`: `REWARDS`, `FORMATS`, `ENVIRONMENTS`, `ADVANTAGES`,
`POLICY_LOSSES`, `RECIPES`, `CORRECTIONS`, `ENGINES` and so on, next to the type of the component.
A function is added with the decorator `@REGISTRY.register("name")`, an object that has a `name`
with `REGISTRY.add(object)`. A gin binding selects it by name; iteration lists the names.
"""

import contextlib
import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import (
    Callable,
    Collection,
    ItemsView,
    Iterator,
    Mapping,
    Sequence,
    ValuesView,
)
from typing import Any, Generic, TypeVar

from manus_jax.errors import UserError
from manus_jax.limits import shown

T = TypeVar("T")
Item = TypeVar("Item")
_MODULES = re.compile(r"\b(?:collections\.abc|typing)\.")  # as in typing.Literal


class RegistryError(UserError, ValueError):
    """A name that is unknown, or registered twice."""


class Registry(Generic[T]):
    """Components of one kind by name, in the order in which they were registered.

    `kind` is what error messages call a component, e.g. "reward function". `reserved` names have a
    meaning of their own where a component is selected, and cannot be registered.
    """

    def __init__(self, kind: str, reserved: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self._reserved = reserved
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[Item], Item]:
        """Decorator: adds the component under `name`. A name can be registered only once."""

        def add(item: Item) -> Item:
            if name in self._items or name in self._reserved:
                raise RegistryError(f"the {self.kind} {name!r} is already registered")
            self._items[name] = item  # type: ignore[assignment]  # keeps the function's own type
            return item

        return add

    def add(self, item: T) -> T:
        """Adds a component under its own `name`."""
        return self.register(item.name)(item)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Components that are added within the block are removed at its end."""
        before = dict(self._items)
        try:
            yield
        finally:
            self._items = before

    def __getitem__(self, name: str) -> T:
        try:
            return self._items[name]
        except KeyError:
            known = [*self._reserved, *self._items]
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise RegistryError(
                f"unknown {self.kind} {name!r}{hint} (known: {', '.join(known)})"
            ) from None

    def items(self) -> ItemsView[str, T]:
        return self._items.items()

    def values(self) -> ValuesView[T]:
        return self._items.values()

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items


def parameter_problem(
    what: str,
    function: Callable[..., object],
    parameters: Mapping[str, Any],
    skip: int,
    given: Collection[str] = (),
) -> str | None:
    """Why `function` cannot be called with these parameters of a configuration; None if it can.

    Its first `skip` arguments and those in `given` come from the program. `what` names it.
    """
    signature = inspect.signature(function)
    named = [
        parameter.name
        for parameter in list(signature.parameters.values())[skip:]
        if parameter.name not in given
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    for name in parameters:
        if name not in named:
            return f"{what} has no parameter {name!r}; it has {', '.join(named) or 'none'}"
    for name in named:
        if name not in parameters and signature.parameters[name].default is inspect.Parameter.empty:
            return f"{what} needs the parameter {name!r}"
    for name, value in parameters.items():
        annotation = signature.parameters[name].annotation
        if not _fits(value, annotation):
            wanted = _MODULES.sub("", inspect.formatannotation(annotation))
            if typing.get_origin(annotation) is typing.Literal:
                wanted = f"one of {', '.join(map(repr, typing.get_args(annotation)))}"
            return f"{what}: {name} = {shown(value)} must be {wanted}"
    return None


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a parameter has its annotated type; unusual annotations are ignored."""
    if typing.get_origin(annotation) is typing.Literal:
        return value in typing.get_args(annotation)
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return any(_fits(value, each) for each in typing.get_args(annotation))
    if annotation is float:
        return type(value) in (int, float) and math.isfinite(value)
    if annotation in (int, bool, str, types.NoneType):
        return type(value) is annotation
    if typing.get_origin(annotation) is Sequence:
        (items,) = typing.get_args(annotation)
        return isinstance(value, Sequence) and all(_fits(each, items) for each in value)
    if typing.get_origin(annotation) is Mapping:
        keys, values = typing.get_args(annotation)
        return isinstance(value, Mapping) and all(
            _fits(key, keys) and _fits(each, values) for key, each in value.items()
        )
    return True

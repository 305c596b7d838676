"""Named components: rewards, action formats, advantages, losses, engines and the like.

Each kind of component has one `Registry`. A component is added with the registry's decorator and
selected by its name in a gin binding.
"""

import difflib
from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

from manus_jax.errors import UserError

T = TypeVar("T")


class RegistryError(UserError, ValueError):
    """A name that is unknown, or registered twice."""


class Registry(Generic[T]):
    """Components of one kind by name, in the order in which they were registered.

    `kind` is what error messages call a component, e.g. "reward function"; `reserved` names cannot
    be registered.
    """

    def __init__(self, kind: str, reserved: Collection[str] = ()) -> None:
        self.kind = kind
        self._reserved = frozenset(reserved)
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: adds the component under `name`. A name can be registered only once."""

        def add(item: T) -> T:
            if name in self._items or name in self._reserved:
                raise RegistryError(f"the {self.kind} {name!r} is already registered")
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        try:
            return self._items[name]
        except KeyError:
            close = difflib.get_close_matches(str(name), self._items, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            known = ", ".join(self._items)
            raise RegistryError(f"unknown {self.kind} {name!r}{hint} (known: {known})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

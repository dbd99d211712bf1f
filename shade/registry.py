"""One way for a name to become a class.

A room owns a `Registry`, its files decorate their classes, and the room's ``__init__`` imports the files. Nothing
else ever compares names, so a new policy, mode, store or codec is one file and one import.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from shade.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of names, with an error that lists them.

    Args:
        noun: What the names are names of, for the error: ``"cache policy"``.
    """

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._entries: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator: ``@POLICIES.register("lru")``."""

        def enter(cls: type[T]) -> type[T]:
            if name in self._entries:
                raise RuntimeError(f"two classes claim the {self._noun} name {name!r}")
            self._entries[name] = cls
            return cls

        return enter

    def get(self, name: str) -> type[T]:
        """The class of that name.

        Args:
            name: As it was registered.

        Returns:
            The class, unchanged.

        Raises:
            UnknownNameError: No such name; the message lists the known ones and the nearest.
        """
        try:
            return self._entries[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise UnknownNameError(
                f"no {self._noun} named {name!r}{hint}; known: {', '.join(sorted(self._entries))}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

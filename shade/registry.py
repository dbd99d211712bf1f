"""Maps names to classes, and hints at the name that was meant.

A package owns a `Registry`, its modules decorate their classes, and its ``__init__`` imports the modules. No other code
compares names, so a new policy, mode, store or codec is one module and one import.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from shade.errors import UnknownNameError

T = TypeVar("T")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a hint to the known word that is nearest to a mistyped one; empty if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


class Registry(Generic[T]):
    """A table of names, with an error that lists them.

    Args:
        noun: The kind of the names in the error: ``"cache policy"``.
    """

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._entries: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Decorates a class with its name: ``@POLICIES.register("lru")``."""

        def enter(cls: type[T]) -> type[T]:
            if name in self._entries:
                raise RuntimeError(f"two classes claim the {self._noun} name {name!r}")
            self._entries[name] = cls
            return cls

        return enter

    def get(self, name: str) -> type[T]:
        """Returns the class; raises `UnknownNameError`, which lists the known names, if there is none."""
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(sorted(self._entries))
            raise UnknownNameError(
                f"no {self._noun} named {name!r}{did_you_mean(name, self._entries)}; known: {known}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

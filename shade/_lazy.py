"""Loads the public names of a package on first use (PEP 562): ``import shade`` alone loads neither torch nor redis.

A package lists each public name twice: under ``TYPE_CHECKING``, for type checkers and editors, and in the table given
to `lazy`, for run time. ``tests/test_public_face.py`` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a package's ``__getattr__`` and ``__dir__``, from the public names that each module defines."""
    home_of = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home_of[name]), name)

    return load, lambda: sorted(home_of)

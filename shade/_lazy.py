"""Loads the public names of a package on first use (PEP 562): ``import shade`` alone loads neither torch nor redis.

A package lists each public name twice: under ``TYPE_CHECKING``, for type checkers and editors, and in the table given
to `lazy`, for run time. ``tests/test_public_face.py`` compares the two.

numba is loaded with the first module that has compiled loops (`compiled`), because that takes half a second which a
command without loops need not wait for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar, cast

from shade.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def lazy(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a package's ``__getattr__`` and ``__dir__``, from the public names that each module defines."""
    home_of = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home_of[name]), name)

    return load, lambda: sorted(home_of)


def load_numba() -> Any:
    """Imports numba; raises `ConfigError` if it is missing, or does not work with this Python and numpy."""
    try:
        import numba
    except Exception as error:  # it says so by several classes
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        cure = "pip install --upgrade 'numba>=0.60'"
        raise ConfigError.of("a numba that works with this Python and numpy", reason, cure) from error
    _let_forks_wait()
    return numba


@functools.cache
def _let_forks_wait() -> None:
    """Makes a fork wait until no thread compiles or loads a build.

    A DataLoader's worker that is forked meanwhile would find numba's lock held by a thread that it does not have, and
    wait for it for ever.
    """
    from numba.core.compiler_lock import global_compiler_lock as lock

    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


def compiled(function: F) -> F:
    """Compiles a function with numba; it runs without the interpreter lock.

    The build is kept on disk, beside the module or in numba's folder of the user.

    ``fastmath`` stays off: sums keep their order and no product is fused into a sum, so every processor gives the same
    bits. A division by 0 gives infinity, as in numpy; a check for it would prevent vector code.
    """
    numba = load_numba()
    try:
        return cast(F, numba.njit(nogil=True, error_model="numpy", cache=True)(function))
    except RuntimeError:  # there is no folder to keep the build in
        return cast(F, numba.njit(nogil=True, error_model="numpy")(function))

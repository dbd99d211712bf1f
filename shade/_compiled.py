"""Compiles functions with numba, for loops over arrays that numpy cannot express in one pass.

The build is kept on disk beside the module, or in numba's own folder of the user. numba is imported with the first
function that is compiled, because that takes half a second which a command without loops need not wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compiles a function with numba; it runs without the interpreter lock.

    ``fastmath`` stays off: sums keep their order and no product is fused into a sum, so every processor gives the same
    bits. A division by 0 gives infinity, as in numpy; a check for it would prevent vector code.
    """
    import numba

    try:
        return cast(F, numba.njit(nogil=True, error_model="numpy", cache=True)(function))
    except RuntimeError:  # there is no folder to keep the build in
        return cast(F, numba.njit(nogil=True, error_model="numpy")(function))

"""Hands out a module of numba loops, or its twin in numpy where they cannot be compiled.

The loops of a module are compiled at first use and kept on disk between runs where a folder can be written to. Its twin
has the same functions with the same results to the last bit, so who gets which is a question of time only; ranks on
different machines still hold the same weights.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("shade.gradient")


def compiled(function: F) -> F:
    """Decorator: numba's nopython mode, without holding the interpreter.

    No ``fastmath``: sums keep their order, and no product is fused into one, so every processor gives the same bits.
    Dividing by 0 gives infinity, as everywhere in arrays; to look for it would cost the vectors.
    """
    import numba

    try:
        return cast(F, numba.njit(nogil=True, error_model="numpy", cache=True)(function))
    except RuntimeError:  # no folder to keep them in
        return cast(F, numba.njit(nogil=True, error_model="numpy")(function))


def choose(loops: str, twin: Any) -> Any:
    """Imports and tries a module of loops.

    Args:
        loops: Full name of a module with ``probe()``, which calls every loop once.
        twin: What has the same functions, in numpy.

    Returns:
        The module, or the twin.
    """
    try:
        module = importlib.import_module(loops)
        module.probe()
    except Exception as error:  # noqa: BLE001 - whatever a compiler may raise: there is another way
        logger.info("%s runs in numpy: %s", loops, error)
        return twin
    return module

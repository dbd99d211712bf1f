"""Hands out compiled loops, or the same functions in numpy where nothing can be compiled.

numba compiles the loops of a module at first use, a second or two, and keeps the build on disk where it can write to a
folder. Each such module has a twin in numpy with the same results to the last bit. So which of the two runs is a
question of time only, and ranks on different machines hold the same weights. The compiled loops are the faster ones on
every processor that was measured (decision 0015), so nothing is timed at run time.

A caller that needs a choice waits for it. `prepare` in a thread that has time makes the wait short.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import numpy as np

from shade.gradient._kernels import arrays
from shade.gradient._kernels.arrays import Places
from shade.types import Bools, Floats

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("shade.gradient")
_lock = threading.Lock()
_chosen: Kernels | None = None


@dataclass(frozen=True)
class Kernels:
    """The passes over a bucket in one implementation; `_kernels.arrays` documents each function."""

    name: str
    pick_elements: Callable[[Floats, Floats, Floats, float, Places, Floats], int]
    pick_lines: Callable[[Floats, Floats, Floats, float, float, Places, Floats], int]
    add_sample: Callable[[Floats, Floats, int, int, Floats], None]
    line_energy: Callable[[Floats, np.float32], Floats]
    name_elements: Callable[[Places, Places], None]
    keep_lost: Callable[[Floats, Places, Floats, Floats], None]
    clear: Callable[[Floats, Places], None]
    put_back: Callable[[Floats, Places, Floats, Bools], int]
    gain_momentum: Callable[[Floats, Floats, float, Floats], None]
    gain_adam: Callable[[Floats, Floats, Floats, Floats, Floats, Floats, Floats], None]
    gain_second: Callable[[Floats, Floats, Floats, Floats, Floats], None]


def _kernels(name: str, module: Any) -> Kernels:
    functions = (field.name for field in fields(Kernels) if field.name != "name")
    return Kernels(name, *(getattr(module, function) for function in functions))


ARRAYS = _kernels("numpy", arrays)


def prepare() -> Kernels:
    """Returns the kernels to use on this machine. The first call compiles them; all others return at once."""
    global _chosen
    if _chosen is None:
        with _lock:
            if _chosen is None:
                _chosen = candidates()[-1]
                logger.info("gradients are compressed by %s", _chosen.name)
    return _chosen


def candidates() -> list[Kernels]:
    """Returns every implementation that works on this machine, numpy's first and the fastest last."""
    module = choose("shade.gradient._kernels.loops", arrays)
    return [ARRAYS] if module is arrays else [ARRAYS, _kernels("numba", module)]


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


def choose(loops: str, twin: Any) -> Any:
    """Imports a module of compiled loops by its full name, and runs each of them once by its ``probe()``. Returns
    ``twin``, an object with the same functions in numpy, if the module cannot be compiled; warns of it."""
    try:
        module = importlib.import_module(loops)
        module.probe()
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything, and the twin always works
        logger.warning(
            "%s cannot be compiled here (%s: %s), so numpy runs it: the same results, several times slower; "
            "check `python -c 'import numba'`, or install another version of numba",
            *(loops, type(error).__name__, str(error).partition("\n")[0]),
        )
        return twin
    return module

"""Chooses, once a process, how to walk: with AVX-512, with any vectors, or in numpy.

The loops in `shade.gradient.kernels.vector` are compiled at first use, a second or two, unless a cached build from an
earlier run is found. Then each way walks a small bucket a few times, and the fastest stays. Results are the same to the
last bit, so the choice is about time only. Whoever needs a choice waits for it; `prepare`, in a thread that has time,
makes the wait short.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shade.gradient.compressor import aligned_zeros
from shade.gradient.kernels import arrays
from shade.gradient.kernels.arrays import LINE, TILE, Places
from shade.types import Floats

PickElements = Callable[[Floats, Floats, Floats, float, Places, Floats], int]
PickLines = Callable[[Floats, Floats, Floats, float, float, Places, Floats], int]
_PROBE_SIZE = 2**20
_PROBE_ROUNDS = 5

logger = logging.getLogger("shade.gradient")
_lock = threading.Lock()
_chosen: Kernels | None = None


@dataclass(frozen=True)
class Kernels:
    """One way to walk; see `shade.gradient.kernels.arrays` for what each function promises."""

    name: str
    pick_elements: PickElements
    pick_lines: PickLines


ARRAYS = Kernels("numpy", arrays.pick_elements, arrays.pick_lines)


def prepare() -> Kernels:
    """The fastest way here; the first call compiles and measures, all others return at once."""
    global _chosen
    if _chosen is None:
        with _lock:
            if _chosen is None:
                _chosen = _choose(candidates())
                logger.info("gradients are compressed by the %s loops", _chosen.name)
    return _chosen


def candidates() -> list[Kernels]:
    """Every way that this machine can go."""
    ways = [ARRAYS]
    try:
        from shade.gradient.kernels.vector import variants

        ways += [Kernels(*functions) for functions in variants()]
    except Exception as error:  # noqa: BLE001 - whatever a compiler may raise: there is another way
        logger.info("gradients are compressed by numpy: %s", error)
    return ways


def _choose(ways: list[Kernels]) -> Kernels:
    """The one whose walks take the least time, in the median."""
    rng = np.random.default_rng(0)
    gradient_D, residual_D = (rng.standard_normal(_PROBE_SIZE, dtype=np.float32) for _ in range(2))
    rest_D = aligned_zeros(_PROBE_SIZE)
    places, values = np.zeros(2 * TILE, dtype=np.uint32), np.zeros(2 * TILE * LINE, dtype=np.float32)
    took: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(_PROBE_ROUNDS):
        for way in ways:
            begun = time.perf_counter()
            way.pick_elements(gradient_D, residual_D, rest_D, 3.6, places, values)
            way.pick_lines(gradient_D, residual_D, rest_D, 1.0, 70.0, places, values)
            took[way.name].append(time.perf_counter() - begun)
    return min(ways, key=lambda way: statistics.median(took[way.name]))

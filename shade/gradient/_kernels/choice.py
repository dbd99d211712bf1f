"""Chooses, once a process, how to walk: with AVX-512, with any vectors, or in numpy.

The loops in `_kernels.vector` are compiled at first use, a second or two, unless a build is found that an
earlier run has kept. Then each way walks a small bucket a few times, and the fastest stays. Results are the same to the
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
from typing import Any

import numpy as np

from shade.gradient._compress.compressor import aligned_zeros
from shade.gradient._kernels import arrays
from shade.gradient._kernels.arrays import LINE, TILE, Places
from shade.types import Bools, Floats

_PROBE_SIZE = 2**20
_PROBE_ROUNDS = 5
_ELEMENT_THRESHOLD, _LINE_THRESHOLD = 3.6, 70.0
"""Over which about one in a hundred sums of two normal numbers lies, and one line in a hundred."""

logger = logging.getLogger("shade.gradient")
_lock = threading.Lock()
_chosen: Kernels | None = None


@dataclass(frozen=True)
class Kernels:
    """One way to walk; see `_kernels.arrays` for what each function promises."""

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


def _kernels(
    name: str,
    pick_elements: Callable[..., int],
    pick_lines: Callable[..., int],
    gain_momentum: Callable[..., None],
    others: Any,
) -> Kernels:
    small = others.add_sample, others.line_energy, others.name_elements, others.keep_lost
    back, adam = (others.clear, others.put_back), (others.gain_adam, others.gain_second)
    return Kernels(name, pick_elements, pick_lines, *small, *back, gain_momentum, *adam)


ARRAYS = _kernels("numpy", arrays.pick_elements, arrays.pick_lines, arrays.gain_momentum, arrays)


def prepare() -> Kernels:
    """The fastest way here; the first call compiles and measures, all others return at once."""
    global _chosen
    if _chosen is None:
        with _lock:
            if _chosen is None:
                _chosen = _fastest(candidates())
                logger.info("gradients are compressed by the %s loops", _chosen.name)
    return _chosen


def candidates() -> list[Kernels]:
    """Every way that this machine can go; numpy's is the first."""
    try:
        from shade.gradient._kernels import loops
        from shade.gradient._kernels.vector import variants

        found = [_kernels(*walks, loops) for walks in variants()]
        _Probe(LINE).walk(found[0])
    except Exception as error:  # noqa: BLE001 - whatever a compiler may raise: there is another way
        logger.info("gradients are compressed by numpy: %s", error)
        return [ARRAYS]
    return [ARRAYS, *found]


def _fastest(ways: list[Kernels]) -> Kernels:
    """The one that takes the least time, in the median."""
    probe = _Probe(_PROBE_SIZE)
    took: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(_PROBE_ROUNDS):
        for way in ways:
            begun = time.perf_counter()
            probe.walk(way)
            took[way.name].append(time.perf_counter() - begun)
    return min(ways, key=lambda way: statistics.median(took[way.name]))


class _Probe:
    """A bucket to walk along.

    Args:
        size: Its elements, a multiple of 16.
    """

    def __init__(self, size: int) -> None:
        rng = np.random.default_rng(0)
        self._gradient_D, self._residual_D = (rng.standard_normal(size, dtype=np.float32) for _ in range(2))
        self._rest_D = aligned_zeros(size)
        self._places = np.zeros(4 * TILE, dtype=np.uint32)
        self._values = np.zeros(4 * TILE * LINE, dtype=np.float32)
        self._sample_L = np.zeros((1, LINE), dtype=np.float32)

    def walk(self, way: Kernels) -> None:
        """Calls each function once."""
        bucket = self._gradient_D, self._residual_D, self._rest_D
        way.pick_elements(*bucket, _ELEMENT_THRESHOLD, self._places, self._values)
        way.pick_lines(*bucket, 1.0, _LINE_THRESHOLD, self._places, self._values)
        way.add_sample(self._gradient_D, self._residual_D, 0, len(self._gradient_D) // LINE, self._sample_L)
        way.line_energy(self._sample_L, np.float32(1))
        way.name_elements(self._places[:1], self._places[: 2 * LINE].reshape(2, LINE)[1:])
        way.keep_lost(self._rest_D, self._places[:1] % np.uint32(LINE), self._values[:1], self._values[:1])
        way.clear(self._rest_D, self._places[:1] % np.uint32(LINE))
        way.put_back(self._rest_D, np.zeros(1, np.uint32), self._values[:LINE].reshape(1, LINE), np.ones(1, np.bool_))
        way.gain_momentum(self._gradient_D, self._residual_D, 0.5, self._rest_D)
        first, second, gradient, new_first, new_second, direction = np.ones((6, LINE), dtype=np.float32)
        coefficients = np.ones(7, dtype=np.float32)
        way.gain_adam(first, second, gradient, coefficients, new_first, new_second, direction)
        way.gain_second(second, gradient, coefficients, new_second, direction)

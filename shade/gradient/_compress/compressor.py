"""Defines a compressor: it adds a gradient to the residual, picks the elements to send, and keeps the others.

The sum never exists on its own: one pass over the bucket adds, picks and keeps, because memory traffic is the cost
(three streams of four bytes an element, as ``residual += gradient``). The pass writes what is kept to a second buffer,
so that the old residual is still there, bit for bit, if the step fails on any rank.

Every choice is a function of the arguments, so a resumed run picks the same elements.

Invariant: ``gradient + residual == picked + rest``, in float32, bit for bit.

Legend: D bucket · K kept.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shade.errors import ConfigError, NonFiniteGradientError
from shade.gradient._kernels.lines import ALIGNMENT_BYTES
from shade.registry import Registry
from shade.types import Floats

_MASK = 2**64 - 1


class Key(NamedTuple):
    """The name of one choice of one run: a random number generator without state."""

    seed: int
    step: int
    bucket: int

    def draw(self, below: int, stream: int = 0) -> int:
        """Returns a number in 0 … below - 1, another one for each stream (splitmix64 over the four fields)."""
        state = 0
        for field in (self.seed, self.step, self.bucket, stream):
            state = (state ^ (field & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
            state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
            state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
            state ^= state >> 31
        return state * below >> 64


class Compressor(ABC):
    """Base class of all compressors. An instance serves one thread at a time; it keeps only scratch memory between
    calls.
    """

    @abstractmethod
    def select(self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, density: float, key: Key) -> Sparse:
        """Picks elements of ``gradient + residual`` and writes the others to ``rest_D``.

        Args:
            gradient_D: float32, contiguous; unchanged.
            residual_D: Of the same size; unchanged.
            rest_D: Of the same size, from `aligned_zeros`, no alias of the others; becomes 0 where picked, the sum
                elsewhere.
            density: The fraction to pick, 0 < density ≤ 1.
            key: The seed of random choices.

        Returns:
            The picked indices and sums: ``density`` · D of them within a tenth, or all that are not 0. The arrays may
                belong to the compressor and are valid until its next call; `ErrorFeedback` copies them.

        Raises:
            NonFiniteGradientError: The sum holds NaN or infinity; the content of ``rest_D`` is undefined.
            ConfigError: The density is out of range, or the arrays do not fit each other.
        """


def wanted_count(size: int, density: float) -> int:
    """Returns how many of ``size`` elements a density asks for: at least one if there are any."""
    return min(size, max(1, math.ceil(size * density)))


def check_density(density: float) -> None:
    """Raises `ConfigError` unless 0 < density ≤ 1."""
    if not 0 < density <= 1:
        raise ConfigError.of("a density in (0, 1]", density, "0.01 sends one element in a hundred")


def check(gradient_D: Floats, residual_D: Floats, rest_D: Floats, density: float) -> None:
    """Raises `ConfigError`, which names the array, unless all arguments of `Compressor.select` fit."""
    check_density(density)
    for name, array_D in (("gradient", gradient_D), ("residual", residual_D), ("rest", rest_D)):
        if array_D.dtype != np.float32 or array_D.ndim != 1 or not array_D.flags.c_contiguous:
            got = f"{array_D.dtype} {array_D.shape} with strides {array_D.strides}"
            raise ConfigError.of(f"a flat contiguous float32 {name}", got, "widen and flatten it into a buffer first")
        if array_D.size != gradient_D.size:
            raise ConfigError.of(
                f"a {name} of {gradient_D.size} elements", array_D.size, "one residual serves one bucket"
            )
    if rest_D.size and rest_D.ctypes.data % ALIGNMENT_BYTES:
        cure = "make it with aligned_zeros"
        raise ConfigError.of(f"a rest that begins at a multiple of {ALIGNMENT_BYTES} bytes", rest_D.ctypes.data, cure)
    if gradient_D.size >= 2**32:
        raise ConfigError.of("a bucket below 2**32 elements", gradient_D.size, "split it")


def check_finite(sum_D: Floats) -> None:
    """Raises `NonFiniteGradientError` if an array holds NaN or infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.add.reduce(sum_D, initial=np.float32(0)))
    # Finite values may add up to infinity.
    if not math.isfinite(total) and not np.isfinite(sum_D).all():
        raise non_finite()


def non_finite() -> NonFiniteGradientError:
    """Returns the error to raise for a gradient that holds NaN or infinity."""
    return NonFiniteGradientError(
        "expected a finite gradient, got NaN or infinity; the residual is unchanged: skip the step on all ranks, lower "
        "the learning rate, or lower the loss scale"
    )


COMPRESSORS: Registry[Compressor] = Registry("compressor")
"""Maps a name to a class. Importing `shade.gradient` fills it."""


# Ascending indices make the index code short and the merge a pass along lists, and the optimizer's memory accesses run
# forward. The maker guarantees the order; only the message decoder checks it, since a check at every hand-over would
# cost more than the work.
@dataclass(frozen=True)
class Sparse:
    """The chosen elements of a bucket; all others are zero."""

    indices_K: npt.NDArray[np.uint32]
    """Ascending, distinct, all < `size`."""
    values_K: Floats
    size: int
    """D, the elements of the bucket, < 2**32."""

    def dense(self) -> Floats:
        """Returns the whole bucket, float32 (D,), in new memory."""
        dense_D = np.zeros(self.size, dtype=np.float32)
        dense_D[self.indices_K] = self.values_K
        return dense_D

    @staticmethod
    def empty(size: int) -> Sparse:
        """Returns a bucket without chosen elements."""
        return Sparse(np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.float32), size)

    @property
    def count(self) -> int:
        """K."""
        return len(self.indices_K)

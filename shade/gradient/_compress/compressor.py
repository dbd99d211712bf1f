"""What a compressor is: it adds a gradient to what was kept back so far, picks the places to send, and keeps the rest.

The sum is never formed on its own: sum, choice and rest are one walk over the bucket, because memory is what it costs
(three streams of four bytes an element, the same as ``residual += gradient``). The rest goes to memory of its own, not
over the old residual. That costs a second buffer, and buys the one thing that a distributed step cannot do without:
until all ranks agree, the step has not happened. A NaN on a far rank, a peer that is lost, a scaler that skips: the old
residual is still there, bit for bit.

Every choice is a function of the arguments: whatever is drawn comes from a counter (`Key`), so that a resumed run, or a
second look at the same step, chooses the same.

Invariant: ``gradient + residual == picked + rest``, in float32, bit for bit.

Legend: D bucket · K kept.

What was chosen of a bucket: places and values, in the order of the places.

One shape for all who pass it on: compressors make it, the wire carries it, the merge adds it up, optimizers apply it.
Ascending places are what makes the index code short, the merge a walk along lists, and the optimizer's memory accesses
run forward. That they are ascending and in range is promised by whoever makes one and checked where it comes from
outside (the wire); looking again at every hand-over would cost more than the work itself.

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
from shade.gradient._kernels.arrays import ALIGNMENT_BYTES
from shade.registry import Registry
from shade.types import Floats

_MASK = 2**64 - 1


class Key(NamedTuple):
    """Names one choice of one run: a random number generator without state."""

    seed: int
    step: int
    bucket: int

    def draw(self, below: int, stream: int = 0) -> int:
        """A number of 0 … below - 1; another for each stream (splitmix64 over the four words)."""
        state = 0
        for field in (self.seed, self.step, self.bucket, stream):
            state = (state ^ (field & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
            state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
            state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
            state ^= state >> 31
        return state * below >> 64


class Compressor(ABC):
    """Base of all compressors. One instance serves one thread at a time; what it keeps between calls is scratch."""

    @abstractmethod
    def select(self, gradient_D: Floats, residual_D: Floats, rest_D: Floats, density: float, key: Key) -> Sparse:
        """Picks from ``gradient + residual``; what is not picked goes to ``rest_D``.

        Args:
            gradient_D: float32, contiguous; unchanged.
            residual_D: As long; unchanged.
            rest_D: As long, from `aligned_zeros`, apart from the other two; becomes 0 where picked, the sum elsewhere.
            density: The fraction to pick, 0 < density ≤ 1.
            key: What is drawn is drawn from it.

        Returns:
            The picked places and their sums: ``density`` · D of them, or within a tenth of that, or all that is not 0.
            They may lie in the compressor's own memory until it chooses again; `ErrorFeedback` hands on copies.

        Raises:
            NonFiniteGradientError: The sum holds NaN or infinity; ``rest_D`` is worth nothing.
            ConfigError: A bad density, or arrays that do not fit each other.
        """


def wanted_count(size: int, density: float) -> int:
    """How many of ``size`` places a density asks for: at least one of a bucket that has any."""
    return min(size, max(1, math.ceil(size * density)))


def check_density(density: float) -> None:
    """Looks at a fraction to send.

    Args:
        density: 0 < density ≤ 1.

    Raises:
        ConfigError: It is none.
    """
    if not 0 < density <= 1:
        raise ConfigError.of("a density in (0, 1]", density, "0.01 sends one element in a hundred")


def check(gradient_D: Floats, residual_D: Floats, rest_D: Floats, density: float) -> None:
    """Looks at what `Compressor.select` was given.

    Args:
        gradient_D: See there.
        residual_D: See there.
        rest_D: See there.
        density: See there.

    Raises:
        ConfigError: A bad density, or arrays that do not fit each other; the message names which.
    """
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
    """Looks for NaN and infinity.

    Args:
        sum_D: Gradient and residual, or what was picked of them.

    Raises:
        NonFiniteGradientError: There is one.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.add.reduce(sum_D, initial=np.float32(0)))
    if not math.isfinite(total) and not np.isfinite(sum_D).all():  # finite values may add up to infinity
        raise non_finite()


def non_finite() -> NonFiniteGradientError:
    """What to raise where NaN or infinity was found."""
    return NonFiniteGradientError(
        "expected a finite gradient, got NaN or infinity; nothing was kept of it: skip the step on all ranks, or lower "
        "the learning rate or the loss scale"
    )


COMPRESSORS: Registry[Compressor] = Registry("compressor")
"""Name → class. Importing `shade.gradient` fills it."""


@dataclass(frozen=True)
class Sparse:
    """A bucket's chosen coordinates; all others are zero."""

    indices_K: npt.NDArray[np.uint32]
    """Ascending, each once, all < `size`."""
    values_K: Floats
    size: int
    """D, the elements of the bucket, < 2**32."""

    def dense(self) -> Floats:
        """The bucket it stands for, float32 (D,), new memory."""
        dense_D = np.zeros(self.size, dtype=np.float32)
        dense_D[self.indices_K] = self.values_K
        return dense_D

    @property
    def count(self) -> int:
        """K."""
        return len(self.indices_K)

"""Whether compressing a piece before it is written saves time: AsymCheck's fine-grained compression.

A piece of n bytes that shrinks to a part r of itself is compressed if and only if

    t_c(n) + t_w(r·n) < t_w(n)

with t_c, t_w straight lines, α + β·n, fitted by least squares to what was measured on this machine when the run began:
compressing pieces of the state itself, writing probes to where snapshots go. AsymCheck has r = 2ρ, a value and a place
for each item of a density ρ; ours is measured with t_c, so that zstandard's part is in it and any codec can be judged.

The model decides for the time until a snapshot is committed. Whoever compresses to save room, and not time, does not
ask it. Invariant: where the model says that compression loses, nothing is compressed.

References:
    AsymCheck, DAC 2026, "selective compression"; its published code measured a memory copy as the cost of a write.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from shade.types import Bytes, Clock

PARTS: Final = (16, 8, 4, 2, 1)
"""A chunk over each of these is a sample."""
_ALIGNED: Final = 64
"""No item is cut by the end of a sample."""
_ROUNDS: Final = 3
"""Tries a sample; the fastest counts: whatever else runs only ever adds."""

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class Line:
    """A cost that grows with length."""

    alpha: float
    """Seconds, whatever the length."""
    beta: float
    """Seconds a byte."""

    @classmethod
    def fit(cls, samples: Sequence[tuple[float, float]]) -> Line:
        """By least squares; neither part is negative.

        Args:
            samples: (bytes, seconds), at least one.

        Returns:
            The line.
        """
        lengths, seconds = np.array(samples, np.float64).T
        spread = lengths - lengths.mean()
        beta = float(spread @ seconds / (spread @ spread)) if spread.any() else 0.0
        beta = max(0.0, beta)
        alpha = float(seconds.mean() - beta * lengths.mean())
        if alpha < 0:  # through the origin, then
            return cls(0.0, float(lengths @ seconds / (lengths @ lengths)))
        return cls(alpha, beta)

    def at(self, num_bytes: float) -> float:
        """Seconds for so many bytes."""
        return self.alpha + self.beta * num_bytes


@dataclass(frozen=True)
class Shrinking:
    """What a codec does to this state."""

    cost: Line
    ratio: float
    """Bytes after over bytes before."""


class CostModel:
    """Decides for one rank.

    Args:
        write: Writes so many bytes to where snapshots go and gives the seconds that it took.
        clock: Seconds.
    """

    def __init__(self, write: Callable[[int], float], clock: Clock = time.perf_counter) -> None:
        self._probe, self._clock = write, clock
        self._writing: Line | None = None
        self._codecs: dict[str, Shrinking] = {}

    def pays(self, codec: str, data: memoryview, encode: Callable[[memoryview], Bytes | None]) -> bool:
        """Whether to compress a chunk; the first of a codec is measured.

        Args:
            codec: Its name.
            data: The chunk.
            encode: Makes the stored form of the chunk, or of the first part of it; None where it cannot.

        Returns:
            The verdict.
        """
        if codec not in self._codecs:
            measured = self._measure(data, encode)
            if measured is None:
                return False
            self._codecs[codec] = measured
            shrinking, writing = measured, self.writing(len(data))
            logger.info(
                "codec %s: %.0f MB/s, to %.1f %% of the bytes; writing: %.0f MB/s after %.2f ms: %s",
                *(codec, 1e-6 / max(shrinking.cost.beta, 1e-15), 100 * shrinking.ratio),
                *(1e-6 / max(writing.beta, 1e-15), 1e3 * writing.alpha),
                "it pays" if self.wins(codec, len(data)) else "it does not pay",
            )
        return self.wins(codec, len(data))

    def wins(self, codec: str, num_bytes: int) -> bool:
        """The inequality; the codec has been measured."""
        shrinking, writing = self._codecs[codec], self.writing(num_bytes)
        compressed = shrinking.cost.at(num_bytes) + writing.at(shrinking.ratio * num_bytes)
        return compressed < writing.at(num_bytes)

    def writing(self, num_bytes: int) -> Line:
        """The cost of writing; the first time it is measured.

        Args:
            num_bytes: Longest probe.

        Returns:
            The line.
        """
        if self._writing is None:
            lengths = [max(1, num_bytes // part) for part in PARTS]
            self._probe(lengths[0])  # the first opens connections, makes folders
            self._writing = Line.fit([(length, min(self._probe(length) for _ in range(_ROUNDS))) for length in lengths])
        return self._writing

    def _measure(self, data: memoryview, encode: Callable[[memoryview], Bytes | None]) -> Shrinking | None:
        samples: list[tuple[float, float]] = []
        ratio = 1.0
        for part in PARTS:
            some = data[: len(data) // part // _ALIGNED * _ALIGNED or len(data)]
            seconds = []
            for _ in range(_ROUNDS):
                begun = self._clock()
                stored = encode(some)
                seconds.append(self._clock() - begun)
                if stored is None:
                    return None
                ratio = len(stored) / len(some)
            samples.append((len(some), min(seconds)))
        return Shrinking(Line.fit(samples), ratio)

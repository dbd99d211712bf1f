"""Whether compressing a piece before it is written saves time: AsymCheck's fine-grained compression.

A piece of n bytes that shrinks to a part r of itself is compressed if and only if

    t_c(n) + t_w(r·n) < t_w(n)

with t_c, t_w straight lines, α + β·n, fitted by least squares to what was measured on this machine when the run began:
all the work that compressing a piece of the state is, writing probes to where snapshots go. AsymCheck has r = 2ρ, a
value and a place for each item of a density ρ; ours is each piece's own: that of its first sixteenth, until it has been
compressed, and then what that came to. A piece that does not pay is left alone for one snapshot, then for two, and so
on up to `PATIENCE`, before its first sixteenth is asked again.

The model decides for the time until a snapshot is committed. Whoever compresses to save room, and not time, does not
ask it. Invariant: where the model says that compression loses, nothing is compressed.

References:
    AsymCheck, DAC 2026, "selective compression"; its published code measured a memory copy as the cost of a write.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from shade.types import Bytes, Clock

PARTS: Final = (16, 8, 4, 2, 1)
"""A chunk over each of these is a sample."""
_TELLING_BYTES: Final = 2**16
"""A shorter beginning says little about how much a piece will shrink."""
_ALIGNED: Final = 64
"""No item is cut by the end of a sample."""
_ROUNDS: Final = 3
"""Tries a sample; the fastest counts: whatever else runs only ever adds."""
PATIENCE: Final = 8
"""Snapshots for which a piece that did not pay again and again is not tried."""

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


@dataclass
class _WritePiece:
    """What a codec makes of one piece of the state."""

    ratio: float = 1.0
    """Bytes after over bytes before, when it was tried last."""
    patience: int = 0
    """Snapshots for which it was left alone when it did not pay last."""
    num_left: int = 0
    """Of these, still to come."""

    def tried(self, data: memoryview, stored: Bytes | None) -> None:
        """Learns the ratio."""
        self.ratio = 1.0 if stored is None else len(stored) / len(data)

    def wait(self) -> None:
        """It did not pay: twice as long as last time."""
        self.patience = self.num_left = min(PATIENCE, 2 * self.patience or 1)


class CostModel:
    """Decides for one rank.

    Args:
        write: Writes so many bytes to where snapshots go and gives the seconds that it took.
        clock: Seconds.
    """

    def __init__(self, write: Callable[[int], float], clock: Clock = time.perf_counter) -> None:
        self._probe, self._clock = write, clock
        self._writing: Line | None = None
        self._compressing: dict[str, Line] = {}
        self._pieces: defaultdict[tuple[str, int], _WritePiece] = defaultdict(_WritePiece)

    def pays(self, codec: str, number: int, data: memoryview, encode: Callable[[memoryview], Bytes | None]) -> bool:
        """Whether to compress a piece; the first of a codec is measured.

        Args:
            codec: Its name.
            number: Of the piece, the same in every snapshot.
            data: The piece.
            encode: Makes the stored form of the piece, or of the first part of it, with all the work that is; None
                where it cannot.

        Returns:
            The verdict.
        """
        if codec not in self._compressing and not self._measure(codec, number, data, encode):
            return False
        limit = self._limit(codec, len(data))
        if limit <= 0:
            return False
        piece = self._pieces[codec, number]
        if piece.ratio >= limit:
            if piece.num_left:
                piece.num_left -= 1
                return False
            some = _first(data, min(PARTS[0], max(1, len(data) // _TELLING_BYTES)))
            piece.tried(some, encode(some))
            if piece.ratio >= limit:
                piece.wait()
        return piece.ratio < limit

    def learn(self, codec: str, number: int, data: memoryview, stored: Bytes | None) -> None:
        """What compressing a piece came to.

        Args:
            codec: Its name.
            number: Of the piece.
            data: The piece.
            stored: The stored form; None: it was not kept.
        """
        piece = self._pieces[codec, number]
        piece.tried(data, stored)
        if piece.ratio < self._limit(codec, len(data)):
            piece.patience = 0
        else:
            piece.wait()

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

    def _limit(self, codec: str, num_bytes: int) -> float:
        """The ratio below which the inequality holds; 0 or less where it never does."""
        writing = self.writing(num_bytes)
        return 1 - self._compressing[codec].at(num_bytes) / max(writing.beta * num_bytes, 1e-15)

    def _measure(self, codec: str, number: int, data: memoryview, encode: Callable[[memoryview], Bytes | None]) -> bool:
        """Fits the line of a codec; False where this piece cannot be compressed, and another has to be measured."""
        samples: list[tuple[float, float]] = []
        for part in PARTS:
            some = _first(data, part)
            seconds = []
            for _ in range(_ROUNDS):
                begun = self._clock()
                stored = encode(some)
                seconds.append(self._clock() - begun)
                if stored is None:
                    return False
            samples.append((len(some), min(seconds)))
        self._compressing[codec] = line = Line.fit(samples)
        piece, writing = self._pieces[codec, number], self.writing(len(data))
        piece.tried(some, stored)
        logger.info(
            "codec %s: %.0f MB/s, to %.1f %% of the bytes; writing: %.0f MB/s after %.2f ms: %s",
            *(codec, 1e-6 / max(line.beta, 1e-15), 100 * piece.ratio),
            *(1e-6 / max(writing.beta, 1e-15), 1e3 * writing.alpha),
            "it pays" if piece.ratio < self._limit(codec, len(data)) else "it does not pay",
        )
        return True


def _first(data: memoryview, part: int) -> memoryview:
    """So much of a piece, in whole items."""
    return data[: len(data) // part // _ALIGNED * _ALIGNED or len(data)]

"""Decides whether compressing a chunk before it is written saves time: AsymCheck's fine-grained compression.

A chunk of n bytes that shrinks to a part r of itself is compressed if and only if

    t_c(n) + t_w(r·n) < t_w(n)            where it is compressed, and then written;
    max(t_c(n), t_w(r·n)) < t_w(n)        where other chunks are written while it is compressed (a streamed upload),

with t_c, t_w lines fitted to measurements on this machine when the run began. Each chunk has its own r. The model
minimises the time until a snapshot is committed; to save space instead, do not use it.

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
"""A chunk's length divided by each of these is the length of a sample."""
_TELLING_BYTES: Final = 2**16
"""A shorter sample says little about how much a chunk shrinks."""
_ALIGNED: Final = 64
"""Sample lengths are multiples of it, so that no item is cut."""
_ROUNDS: Final = 3
"""Measurements of a sample; the fastest counts, since other work only adds."""
PATIENCE: Final = 8
"""Most snapshots for which a chunk that did not pay is not tried."""

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class Line:
    """A cost that grows with length."""

    alpha: float
    """Seconds at length 0."""
    beta: float
    """Seconds per byte."""

    @classmethod
    def fit(cls, samples: Sequence[tuple[float, float]]) -> Line:
        """Fits a line to (bytes, seconds), at least one, by least squares; neither part is negative."""
        lengths, seconds = np.array(samples, np.float64).T
        spread = lengths - lengths.mean()
        beta = float(spread @ seconds / (spread @ spread)) if spread.any() else 0.0
        beta = max(0.0, beta)
        alpha = float(seconds.mean() - beta * lengths.mean())
        # A negative start would make short chunks free.
        if alpha < 0:  # through the origin, then
            return cls(0.0, float(lengths @ seconds / (lengths @ lengths)))
        return cls(alpha, beta)

    def at(self, num_bytes: float) -> float:
        """Returns the seconds for so many bytes."""
        return self.alpha + self.beta * num_bytes


@dataclass
class _WritePiece:
    """How well a codec compresses one chunk of the state."""

    ratio: float = 1.0
    """Compressed over original length, when it was tried last."""
    patience: int = 0
    """Snapshots for which it was not tried after it did not pay last."""
    num_left: int = 0
    """Remaining snapshots of these."""

    def tried(self, data: memoryview, stored: Bytes | None) -> None:
        """Sets the ratio."""
        self.ratio = 1.0 if stored is None else len(stored) / len(data)

    def wait(self) -> None:
        """Waits twice as long as last time, since it did not pay."""
        self.patience = self.num_left = min(PATIENCE, 2 * self.patience or 1)


class CostModel:
    """The cost model of one rank; ``write`` writes so many bytes to the first tier and returns the seconds."""

    def __init__(self, write: Callable[[int], float], clock: Clock = time.perf_counter) -> None:
        self._probe, self._clock = write, clock
        self._writing: Line | None = None
        self._compressing: dict[str, Line] = {}
        self._pieces: defaultdict[tuple[str, int], _WritePiece] = defaultdict(_WritePiece)

    def pays(
        self,
        codec: str,
        number: int,
        data: memoryview,
        encode: Callable[[memoryview], Bytes | None],
        *,
        overlaps: bool = False,
    ) -> bool:
        """Whether compressing a chunk pays; measures a codec at its first chunk. ``number`` is the chunk's, the same in
        every snapshot; ``encode`` compresses the chunk or its first part, and returns None where it cannot;
        ``overlaps`` says that others are written meanwhile."""
        if codec not in self._compressing and not self._measure(codec, number, data, encode, overlaps):
            return False
        limit = self._limit(codec, len(data), overlaps)
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

    def learn(self, codec: str, number: int, data: memoryview, stored: Bytes | None, *, overlaps: bool = False) -> None:
        """Counts a compressed chunk; None as its stored form means that it was not kept."""
        piece = self._pieces[codec, number]
        piece.tried(data, stored)
        if piece.ratio < self._limit(codec, len(data), overlaps):
            piece.patience = 0
        else:
            piece.wait()

    def writing(self, num_bytes: int) -> Line:
        """Returns the cost of writing; measures it the first time, with probes of at most so many bytes."""
        if self._writing is None:
            lengths = [max(1, num_bytes // part) for part in PARTS]
            self._probe(lengths[0])  # the first opens connections, makes folders
            self._writing = Line.fit([(length, min(self._probe(length) for _ in range(_ROUNDS))) for length in lengths])
        return self._writing

    def _limit(self, codec: str, num_bytes: int, overlaps: bool) -> float:
        """Returns the ratio below which compression pays; 0 or less if it never does."""
        share = self._compressing[codec].at(num_bytes) / max(self.writing(num_bytes).beta * num_bytes, 1e-15)
        return float(share < 1) if overlaps else 1 - share

    def _measure(
        self, codec: str, number: int, data: memoryview, encode: Callable[[memoryview], Bytes | None], overlaps: bool
    ) -> bool:
        """Fits the line of a codec; returns False if this chunk cannot be compressed, and another must be measured."""
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
            "it pays" if piece.ratio < self._limit(codec, len(data), overlaps) else "it does not pay",
        )
        return True


def _first(data: memoryview, part: int) -> memoryview:
    """Returns the first part of a chunk, in whole items."""
    return data[: len(data) // part // _ALIGNED * _ALIGNED or len(data)]

"""Orders an epoch so that neighbours in the data set come near each other: samples of one block within one window.

The blocks come in a random sequence, laid end to end, and each sample is shifted by a random distance below the window;
the samples are taken in that order. So at any position the samples of about window / (samples of a block) blocks are
mixed, and a block is read once. Which samples an epoch draws and what they weigh is not touched: what is unbiased stays
so. Where neighbours are alike (sorted by class, cut from one video), batches vary more than in a global order.

Invariants: the result has the samples of the given order, repeats included; it depends on nothing but that set, the
blocks, the window and the generator. MosaicML Streaming's ``py1e`` shifts in this way. Decision 0045.

Legend: K drawn in an epoch · D blocks.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shade.sampling.base import parts
from shade.types import Indices, Order

PART: Final = 1 << 20
"""Samples that are sorted at once, with those of a window; it does not change the result."""


def windowed(order_K: Order, first_D: Indices, window: int, random: np.random.Generator) -> Order:
    """Returns the samples of an order in another one, in which those of a block are within about a window.

    Args:
        order_K: The samples that were drawn, in any order.
        first_D: int64 (D,), the first sample of each block, ascending, from 0.
        window: Over how many positions the samples of a block are spread, ≥ 1.
        random: Gives the sequence of the blocks and the shifts.

    Returns:
        The same samples, in the type of ``order_K``.
    """
    drawn_K = np.sort(order_K)
    bound = np.append(np.searchsorted(drawn_K, first_D.astype(drawn_K.dtype)), len(drawn_K))
    # A shift of each sample, not groups of blocks shuffled one after the other: at the border of two groups all blocks
    # of the next one would be wanted at once. Here one block more is wanted with every block that is used up.
    sequence_D = random.permutation(len(first_D))
    length_D = np.diff(bound)[sequence_D]
    begin_D = np.cumsum(length_D) - length_D
    windowed_K = np.empty_like(order_K)
    mask = random.integers(1 << 31, dtype=np.uint64)  # so that of samples in one position not always the lower is first
    positions = np.empty(0, dtype=np.uint64)
    num_done = at = 0
    while at < len(sequence_D):
        stop = max(at + 1, int(np.searchsorted(begin_D, begin_D[at] + PART)))
        lengths, begins = length_D[at:stop], begin_D[at:stop]
        total = int(lengths.sum())
        found = drawn_K[np.arange(total) + np.repeat(bound[sequence_D[at:stop]] - (begins - begins[0]), lengths)]
        position = random.integers(window, size=total, dtype=np.uint32) + np.repeat(begins, lengths)
        positions = np.concatenate([positions, position.astype(np.uint64) << 32 | found.astype(np.uint64) ^ mask])
        positions.sort()
        at = stop
        # Samples of later blocks have no position before this one.
        is_last = at == len(sequence_D)
        num_ready = len(positions) if is_last else int(np.searchsorted(positions, np.uint64(int(begin_D[at]) << 32)))
        windowed_K[num_done : num_done + num_ready] = positions[:num_ready] & 0xFFFFFFFF ^ mask
        num_done += num_ready
        positions = positions[num_ready:]
    return windowed_K


class BlockUses(NamedTuple):
    """When the blocks of an order are used."""

    sequence: Indices
    """The blocks that are used, by their first use."""
    first_D: npt.NDArray[np.int64]
    """The position in the order of each block's first use; K for one that is not used."""
    last_D: npt.NDArray[np.int64]
    """The position of its last use; -1 for one that is not used."""


def block_uses(order_K: Order, first_D: Indices, start: int = 0) -> BlockUses:
    """Returns when the blocks of an order are used from a position on.

    Args:
        order_K: Sample indices.
        first_D: int64 (D,), the first sample of each block, ascending, from 0.
        start: The position in the order from which uses count.

    Returns:
        Positions count from the order's own begin.
    """
    num_positions = len(order_K)
    num_samples = int(order_K.max(initial=-1)) + 1
    block_N = np.repeat(np.arange(len(first_D), dtype=np.int32), np.diff(first_D, append=max(num_samples, first_D[-1])))
    first_use_D = np.full(len(first_D), num_positions, dtype=np.int64)
    last_use_D = np.full(len(first_D), -1, dtype=np.int64)
    for part in reversed(list(parts(num_positions - start))):
        block = block_N[order_K[start:][part]]
        position = start + part.start + np.arange(len(block))
        first_use_D[block[::-1]] = position[::-1]  # of several, the last that is assigned stays
        is_new = last_use_D[block] < 0
        last_use_D[block[is_new]] = position[is_new]
    sequence = np.argsort(first_use_D, kind="stable")[: int((last_use_D >= 0).sum())]
    return BlockUses(sequence, first_use_D, last_use_D)

"""Makes random transforms a function of the batch and not of who happens to load it.

A worker's generator advances with every batch it loads, so what a transform draws depends on the number of workers, on
which of them got the batch, and on where the run was stopped. Here the generators are set before each batch, from the
run's seed, the epoch and the batch's own indices. So the same batch gets the same augmentation with 0 or 4 workers, in
one go or after a resume, and another one in the next epoch. What the user's process had drawn so far is put back
afterwards: the model's own random numbers do not notice.

Nothing happens until somebody who knows the epoch calls `follow`, as `TrainSession` does. The seed lies in shared
memory, where workers that outlive the epoch see it change. The price is about 0.1 ms a batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import xxhash
from torch import default_generator

_SILENT = 0


def set_generators(*key: int) -> None:
    """Sets torch's, numpy's and Python's global generators from a key: the same numbers, the same stream.

    Args:
        *key: Integers that fit into 64 bits.
    """
    seed = _seed_of(key)
    default_generator.manual_seed(seed)  # torch.manual_seed asks every backend, which costs 50 times that
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _seed_of(key: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(np.array(key, dtype=np.int64).tobytes())


class BatchGenerators:
    """The generators of the transforms of one data set; pickles into workers and stays connected."""

    def __init__(self) -> None:
        self._seed = torch.zeros(1, dtype=torch.int64)
        self._seed.share_memory_()  # type: ignore[no-untyped-call]

    def follow(self, seed: int, epoch: int) -> None:
        """From the next batch on, draw for this epoch."""
        self._seed[0] = xxhash.xxh3_64_intdigest(np.array([seed, epoch], dtype=np.int64).tobytes()) >> 1 or 1

    @property
    def following(self) -> bool:
        """Whether the epoch is known; until then nothing is set."""
        return int(self._seed[0]) != _SILENT

    def alone(self, indices: Sequence[int], otherwise: int) -> torch.Generator:
        """A generator that draws for a batch what torch's global one would, and that no other thread draws from.

        Args:
            indices: The batch's.
            otherwise: Takes the place of the seed while no epoch is known.

        Returns:
            A generator of the caller's own.
        """
        generator = torch.Generator()
        generator.manual_seed(_seed_of((int(self._seed[0]) or otherwise, *indices)))
        return generator

    @contextmanager
    def of(self, indices: Sequence[int]) -> Iterator[None]:
        """While a batch is transformed."""
        seed = int(self._seed[0])
        if seed == _SILENT:
            yield
            return
        before = default_generator.get_state(), np.random.get_state(), random.getstate()
        set_generators(seed, *indices)
        try:
            yield
        finally:
            default_generator.set_state(before[0])
            np.random.set_state(before[1])
            random.setstate(before[2])

"""Makes random transforms a function of the batch, and not of the process that loads it.

The generators are set before each batch from the run's seed, the epoch and the batch's own indices. So the same batch
gets the same augmentation with 0 or 4 workers, in one go or after a resume, and another one in the next epoch.
Afterwards the state of the process's generators is restored: the model's own random numbers do not change.

It does nothing until `BatchGenerators.follow` sets the epoch, as `TrainSession` does. Price: about 0.1 ms a batch.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
from torch import default_generator

_SILENT = 0


def set_generators(*key: int) -> None:
    """Sets torch's, numpy's and Python's global generators from a key of 64-bit integers: the same key, the same
    stream."""
    seed = _seed_of(key)
    # torch.manual_seed asks every backend, which costs 50 times that.
    default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _seed_of(key: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(np.array(key, dtype=np.int64).tobytes())


def generator_states() -> dict[str, bytes]:
    """Returns the states of the global generators, by the name of whose they are."""
    state = np.random.get_state()
    states = {
        "torch's generator": default_generator.get_state().numpy().tobytes(),
        "NumPy's generator": repr((state[1].tobytes(), state[2:])).encode(),  # type: ignore[index]
        "Python's generator": repr(random.getstate()).encode(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["CUDA's generator"] = torch.cuda.get_rng_state().numpy().tobytes()
    return states


def plain_states() -> tuple[Any, Any]:
    """Returns the states of Python's and NumPy's global generators, as plain values."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, keys.tolist(), *rest)  # type: ignore[attr-defined]


def set_plain_states(*states: Any) -> None:
    """Sets what `plain_states` returned, or nothing."""
    if states:
        (version, keys, normal), numpy = states
        random.setstate((version, tuple(keys), normal))
        np.random.set_state(tuple(numpy))


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restores the states of torch's (the current CUDA device's, too), numpy's and Python's global generators
    afterwards."""
    before = default_generator.get_state(), np.random.get_state(), random.getstate()
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
        if on_device is not None:
            torch.cuda.set_rng_state(on_device)


class BatchGenerators:
    """The generators of one data set's transforms; pickles into workers and stays connected."""

    def __init__(self) -> None:
        self._share()

    def _share(self) -> None:
        # In shared memory, so that workers that outlive the epoch see it change.
        self._pid, self._seed = os.getpid(), torch.zeros(1, dtype=torch.int64)
        self._seed.share_memory_()  # type: ignore[no-untyped-call]

    def follow(self, seed: int, epoch: int) -> None:
        """Sets the epoch, from the next batch on, in this process and in workers that it starts."""
        if self._pid != os.getpid():  # a rank that got the data set from another process
            self._share()
        # 63 bits fit into an int64; 0 is `_SILENT`.
        self._seed[0] = xxhash.xxh3_64_intdigest(np.array([seed, epoch], dtype=np.int64).tobytes()) >> 1 or 1

    @property
    def following(self) -> bool:
        """Returns whether the epoch is known; until then no generator is set."""
        return int(self._seed[0]) != _SILENT

    def alone(self, indices: Sequence[int], otherwise: int) -> torch.Generator:
        """Returns a generator of the caller's own, which draws for a batch what torch's global one would. ``otherwise``
        takes the place of the seed while no epoch is known."""
        generator = torch.Generator()
        generator.manual_seed(_seed_of((int(self._seed[0]) or otherwise, *indices)))
        return generator

    @contextmanager
    def of(self, indices: Sequence[int], otherwise: int = _SILENT) -> Iterator[None]:
        """Sets the generators while a batch is transformed, and restores them afterwards. ``otherwise`` takes the place
        of the seed while no epoch is known."""
        seed = int(self._seed[0]) or otherwise
        if seed == _SILENT:
            yield
            return
        with kept_generators():
            set_generators(seed, *indices)
            yield

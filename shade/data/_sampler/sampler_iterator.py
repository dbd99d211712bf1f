"""EpochWalk: one pass over an epoch, as ``iter(sampler)`` gives it; it says how far it has come.

A loader that keeps its own place (torchdata's ``StatefulDataLoader``) asks the iterator of its sampler where it stands,
and sets a new one there when it resumes. The sampler cannot answer that: it counts the steps whose losses came back,
and the batches that workers have under way run ahead of those. So there are two numbers, each for its reader:
`ShadeSampler.steps_done` is what training has done, for a checkpoint of the training; ``num_taken`` is what a loader
has been given, for a loader that brings back what was under way by itself.

Nothing happens before the first index is asked for: such loaders make more iterators than they use.

Invariant: a walk that was set to n goes on with index n of this rank's epoch, and then to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shade.errors import ConfigError

Begin = Callable[[bool], tuple[int, Iterator[int]]]
"""Begins the pass, told whether this walk was set to a place: (indices taken before, the rest)."""
Seek = Callable[[int, bool], None]
"""Sets the sampler to a step, told whether that is where a batch ends."""


class SamplerIterator(Iterator[int]):
    """An iterator over this rank's indices.

    Args:
        batch_size: Of one rank: a place is saved with it, so that it can be found again on other ranks.
        begin: See `Begin`.
        seek: See `Seek`.
    """

    def __init__(self, batch_size: int, begin: Begin, seek: Seek) -> None:
        self._batch_size, self._begin, self._seek = batch_size, begin, seek
        self._rest: Iterator[int] | None = None
        self._num_taken: int | None = None
        self._is_placed = False

    def __next__(self) -> int:
        if self._rest is None:
            self._num_taken, self._rest = self._begin(self._is_placed)
        index = next(self._rest)
        assert self._num_taken is not None, "it has begun"
        self._num_taken += 1
        return index

    def state_dict(self) -> dict[str, Any]:
        """How many indices of this rank's epoch were taken; None before the walk has begun."""
        return {"num_taken": self._num_taken, "batch_size": self._batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the place of `state_dict`; the sampler's own state, which says of which epoch, was loaded before.

        Args:
            state: From `state_dict`.

        Raises:
            ConfigError: The place lies inside a batch.
        """
        num_taken, batch_size = state["num_taken"], state["batch_size"]
        if num_taken is not None:
            self._seek(-(-num_taken // batch_size), num_taken % batch_size == 0)
            self._num_taken, self._is_placed = num_taken, True


def check_order(first: int, shares: Callable[[int], list[int]], step: int, num_steps: int) -> None:
    """Whether the batch that is reported is the one that was handed out at this step.

    It is not when something between the sampler and the loop deals the batches out to ranks once more: this rank would
    then train on every W-th of its own batches, and the rest of the data on nobody's.

    Args:
        first: First sample index of the reported batch.
        shares: Step → this rank's samples of it.
        step: The step whose report this is.
        num_steps: Of the epoch.

    Raises:
        ConfigError: It is this rank's batch of a later step.
    """
    if first in shares(step):
        return
    for later in range(step + 1, min(num_steps, step + 64)):
        if first in shares(later):
            raise ConfigError.of(
                f"the losses of the batch that was handed out at step {step} of the epoch",
                f"those of step {later}'s",
                "the sampler deals batches out to ranks itself: leave the loader out of accelerator.prepare(…), or "
                "switch off whatever else shards it",
            )

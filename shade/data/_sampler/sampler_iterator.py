"""SamplerIterator: one pass over an epoch, as ``iter(sampler)`` returns it; it says how far it has come.

A loader that keeps its own place (torchdata's ``StatefulDataLoader``) asks its sampler's iterator for the place, and
sets it when it resumes. The sampler cannot answer: it counts the steps whose losses were reported, and the batches of
the workers run ahead of those. So there are two numbers: `ShadeSampler.steps_done` is what training has done, for a
checkpoint of the training; ``num_taken`` is what the loader was given, for a loader that restores its batches itself.

The pass begins when its first index is asked for, because such loaders make more iterators than they use.

Invariant: an iterator that was set to n returns index n of this rank's epoch next, and then the rest up to the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from shade.errors import ConfigError
from shade.types import Indices

LOOK_AHEAD_STEPS = 64
"""Later steps that `check_order` compares a batch with."""


class IteratedSampler(Protocol):
    """What an iterator calls on its sampler; `ShadeSampler` is one."""

    batch_size: int
    """Batch of one rank. A place is saved with it, so that other ranks can find it."""

    def _begin_pass(self, *, is_placed: bool) -> tuple[int, Iterator[int]]:
        """Begins the pass, which ``is_placed`` if the iterator was set to a place; returns how many indices were taken
        before it, and the rest."""
        ...

    def _seek(self, step: int, *, is_between: bool) -> None:
        """Sets where the next pass begins; ``is_between`` says that a batch ends there."""
        ...


class SamplerIterator(Iterator[int]):
    """An iterator over this rank's indices; the sampler does the work."""

    def __init__(self, sampler: IteratedSampler) -> None:
        self._sampler = sampler
        self._rest: Iterator[int] | None = None
        self._num_taken: int | None = None
        self._is_placed = False

    def __next__(self) -> int:
        if self._rest is None:
            self._num_taken, self._rest = self._sampler._begin_pass(is_placed=self._is_placed)
        index = next(self._rest)
        assert self._num_taken is not None, "it has begun"
        self._num_taken += 1
        return index

    def state_dict(self) -> dict[str, Any]:
        """Returns how many indices of this rank's epoch were taken; None before the pass has begun."""
        return {"num_taken": self._num_taken, "batch_size": self._sampler.batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the place of a `state_dict`. Load the sampler's state, which holds the epoch, before.

        Raises ConfigError if the place lies inside a batch.
        """
        num_taken, batch_size = state["num_taken"], state["batch_size"]
        if num_taken is not None:
            self._sampler._seek(-(-num_taken // batch_size), is_between=num_taken % batch_size == 0)
            self._num_taken, self._is_placed = num_taken, True


def check_order(first: int, step: int, dealt: Sequence[Indices]) -> None:
    """Checks that the batch that is reported is the one that was handed out at this step.

    It is not if something between the sampler and the loop deals the batches out to ranks a second time: this rank
    would then train on every W-th of its own batches, and no rank would train on the rest of the data.

    Args:
        first: First sample index of the reported batch.
        step: The step of this report.
        dealt: This rank's samples of that step and of the steps after it.

    Raises:
        ConfigError: It is this rank's batch of a later step.
    """
    for later, index_B in enumerate(dealt, step):
        if first in index_B:
            if later == step:
                return
            raise ConfigError.of(
                f"the losses of the batch that was handed out at step {step} of the epoch",
                f"those of step {later}'s",
                "the sampler deals batches out to ranks itself: leave the loader out of accelerator.prepare(…), or "
                "switch off whatever else shards it",
            )

"""Where training is in the stream."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data.dataloader import _BaseDataLoaderIter

from shade.errors import ConfigError
from shade.types import Indices

LOOK_AHEAD_STEPS = 64
"""Later steps that `check_order` compares a batch with."""


class IteratedSampler(Protocol):
    """What an iterator calls on its sampler; `ShadeSampler` is one."""

    batch_size: int
    """Batch of one rank. A place is saved with it, so that other ranks can find it."""

    @property
    def num_steps(self) -> int:
        """Returns the steps of a whole pass."""
        ...

    def _begin_pass(self, *, is_placed: bool) -> tuple[int, Iterator[Any]]:
        """Begins the pass, which ``is_placed`` if the iterator was set to a place; returns how many indices were taken
        before it, and the rest."""
        ...

    def _seek(self, step: int, *, is_between: bool) -> None:
        """Sets where the next pass begins; ``is_between`` says that a batch ends there."""
        ...


_CALLERS = 8
"""Calls between the loader's iterator and the sampler, at most."""


class LoaderCount:
    """Counts the batches that a loop gets from a DataLoader's iterator, whose workers ask for more than that.

    DataLoader does not say who asks a sampler for indices, so its iterator is looked for among the callers.
    """

    def __init__(self, iterator: _BaseDataLoaderIter) -> None:
        self._attributes = vars(iterator)  # and not the iterator, which ends when the loop drops it
        self._num_before = iterator._num_yielded
        self.is_over = False
        """Whether the loop has dropped the pass."""
        # Workers that stay have one iterator for all passes, and a new order in each.
        self._ends = [weakref.ref(iterator, self._end)]
        with contextlib.suppress(TypeError):  # an itertools object
            self._ends.append(weakref.ref(iterator._sampler_iter, self._end))

    @classmethod
    def of_caller(cls) -> LoaderCount | None:
        """Returns the count of the DataLoader's iterator that is asking; None if none is."""
        frame = sys._getframe(1)
        for _ in range(_CALLERS):
            found = frame.f_locals.get("self")
            if isinstance(found, _BaseDataLoaderIter):
                return cls(found)
            if frame.f_back is None:
                break
            frame = frame.f_back
        return None

    def _end(self, _: Any) -> None:
        self.is_over, self._attributes = True, {"_num_yielded": self._attributes["_num_yielded"]}

    def __call__(self) -> int:
        return int(self._attributes["_num_yielded"]) - self._num_before


def place_of_node(sampler: IteratedSampler) -> dict[str, Any]:
    """Returns the place in a sampler's state if a node of torchdata asks for it; empty if anything else asks.

    A node reads ahead of training, and keeps the state with what was made of the indices that it has. Training has done
    less. ``inside_batch`` is there if some indices of a batch are missing.
    """
    node = sys._getframe(2).f_locals.get("self")
    iterator = getattr(node, "_it", None) if type(node).__module__ == "torchdata.nodes.adapters" else None
    if not isinstance(iterator, SamplerIterator) or iterator._num_taken is None:
        return {}
    step = -(-iterator._num_taken // sampler.batch_size)
    is_between = iterator._num_taken % sampler.batch_size == 0 or step == sampler.num_steps
    return {"steps_done": step} if is_between else {"steps_done": step, "inside_batch": True}


def check_place(state: dict[str, Any]) -> None:
    """Raises ConfigError for a sampler's state that was taken inside a batch."""
    if state.get("inside_batch"):
        raise ConfigError.of(
            "a place between two batches",
            f"one inside the batch before step {state['steps_done']}",
            "give loader and sampler one batch_size",
        )


class SamplerIterator(Iterator[Any]):
    """An iterator over this rank's indices; the sampler does the work."""

    def __init__(self, sampler: IteratedSampler) -> None:
        self._sampler = sampler
        self._rest: Iterator[Any] | None = None
        self._num_taken: int | None = None
        self._is_placed = False

    def __next__(self) -> Any:
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
                "report every batch on every rank; if you do, something shards a second time what the sampler dealt to "
                "ranks: leave the loader out of accelerator.prepare(…), or switch off whatever else shards it",
            )

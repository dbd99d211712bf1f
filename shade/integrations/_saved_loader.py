"""A loader that saves training while a loop iterates over it, and continues where the newest snapshot was taken.

A loop that asks for the next batch has done the step before, with all that belongs to it. So the loader counts and
saves there, before it fetches, and the loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shade.checkpoint import Checkpointer
from shade.data import ShadeSampler
from shade.types import Stateful

END = object()


class SavedLoader:
    """Iterates over a DataLoader; the base of adapters for loops that are the user's own.

    Args:
        loader: The loader of the training data, by a `ShadeSampler` or another sampler.
        objects: What is saved beside its place, by name: model, optimizer, scheduler …
        **options: As for `Checkpointer`.
    """

    def __init__(self, loader: Any, objects: Mapping[str, Stateful], **options: Any) -> None:
        self.loader, self.checkpointer = loader, Checkpointer(**options)
        self.epoch = self._num_done = 0
        self._generators: dict[str, torch.Tensor] = {}
        self._has_begun = False
        self._keeps_place = isinstance(loader.sampler, ShadeSampler)
        own = {"sampler": loader.sampler} if self._keeps_place else {}
        self.checkpointer.attach(**objects, **own, place=self)
        self._step = self.checkpointer.restore_latest().step

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun:
            self.epoch, self._num_done = self.epoch + 1, 0
        self._has_begun = True
        for each in (self.loader, self.loader.sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(self.epoch)
        if self._step:
            torch.set_rng_state(self._generators["torch"].clone())
            for name, generator in self._own().items():
                generator.set_state(self._generators[name].clone())
        else:
            self._generators = {"torch": torch.get_rng_state(), **{k: v.get_state() for k, v in self._own().items()}}
        batches = self._begin(0 if self._keeps_place else self._num_done)
        if self._step:
            self.checkpointer.restore(self._step, only=["random"])
            self._step = 0
        while (batch := next(batches, END)) is not END:
            yield batch
            self._num_done += 1
            if self._is_step:
                self.checkpointer.step()

    def _own(self) -> dict[str, torch.Generator]:
        """Returns the generator of the loader's order, if it has one of its own."""
        found = getattr(self.loader, "synchronized_generator", None) or getattr(self.loader.sampler, "generator", None)
        return {"own": found} if isinstance(found, torch.Generator) else {}

    def _begin(self, num_done: int) -> Iterator[Any]:
        """Begins the epoch, of which so many batches are done; returns the others."""
        batches: Iterator[Any] = iter(self.loader)
        for _ in range(num_done):
            next(batches, None)
        return batches

    @property
    def _is_step(self) -> bool:
        """Whether the batch that was handed out last has ended a step."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Returns the place, and the generators as they were when the epoch began."""
        return {"epoch": self.epoch, "num_done": self._num_done, "generators": self._generators}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a place."""
        self.epoch, self._num_done, self._generators = state["epoch"], state["num_done"], state["generators"]

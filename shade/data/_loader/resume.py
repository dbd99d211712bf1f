"""EpochProgress: counts how far training is in its epoch. ResumableBatches: returns a loader to that place.

A loader is always some batches ahead of training. A state must hold what training has got: `EpochProgress` counts it,
and `ResumableBatches` leaves out as many batches when the epoch begins again. A `ShadeSampler` can begin in the middle.
With any other sampler the epoch's order is drawn again, from the generator's state at the first draw, and the batches
that training had are left out.

Invariant: the rest of a resumed epoch is the rest of the interrupted one, for every sampler that draws from the
loader's generator (or the process's) when its iteration begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import default_generator

from shade.data._sampler.sampler import ShadeSampler
from shade.errors import ConfigError


class EpochProgress:
    """Counts the batches of an epoch, whose sampler draws from ``generator`` (None: the process's)."""

    def __init__(self, sampler: Any, generator: torch.Generator | None) -> None:
        self._sampler = sampler if isinstance(sampler, ShadeSampler) else None
        self._generator = default_generator if generator is None else generator
        self._order: torch.Tensor | None = None
        self.num_batches = 0
        """Batches of this epoch that training has got."""
        self._first = 0
        self._epoch: int | None = None
        self._resume: dict[str, Any] | None = None
        self.seed = 0
        """Seed of this epoch's random draws that follow no other rule."""

    def begin(self) -> None:
        """Begins an epoch, or the rest of one."""
        resume = self._resume
        self.num_batches = 0 if resume is None else resume["batches"]
        self._epoch = None

    def take_seed(self) -> int:
        """Returns this epoch's seed: drawn as DataLoader draws its workers', or that of the epoch that is resumed."""
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())
        self.seed = seed if self._resume is None else self._resume["seed"]
        return self.seed

    def open(self, batches: Iterable[Sequence[int]]) -> Iterator[Sequence[int]]:
        """Yields the sample indices of the batches that are left, in order."""
        resume, self._resume = self._resume, None
        if self._sampler is not None:
            iterator = iter(batches)
            first = next(iterator, None)
            self._epoch, self._first = self._sampler.epoch, self._sampler.steps_done
            self.num_batches = 0
        else:
            now = self._generator.get_state()
            self._order = now if resume is None else resume["order"]
            if resume is not None:
                self._generator.set_state(resume["order"])
            iterator = iter(batches)
            first = next(iterator, None)
            if resume is not None:
                self._generator.set_state(now)
                for _ in range(resume["batches"]):
                    first = next(iterator, None)
        if first is not None:
            yield first
            yield from iterator

    def got_one(self) -> None:
        """Counts a batch that training has got."""
        self.num_batches += 1

    def end(self) -> None:
        """Ends the epoch, after training has got the last batch."""
        if self._sampler is None:
            self.num_batches, self._order = 0, None

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's state."""
        if self._sampler is None:
            if self._resume is not None:
                return dict(self._resume)
            return {"batches": self.num_batches, "order": self._order, "seed": self.seed, "sampler": None}
        sampler = self._sampler.state_dict()
        if self._epoch == self._sampler.epoch:
            sampler["steps_done"] = self._first + self.num_batches
        return {"batches": 0, "order": None, "seed": self.seed, "sampler": sampler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the loader's state. Raises ConfigError if it belongs to another kind of sampler."""
        if (state["sampler"] is None) != (self._sampler is None):
            raise ConfigError.of(
                "the state of a loader with the same kind of sampler",
                "one with a ShadeSampler" if self._sampler is None else "one without",
                "resume with the saved settings",
            )
        self._resume = dict(state) if state["order"] is not None or self._sampler is not None else None
        if self._sampler is not None:
            self._sampler.load_state_dict(state["sampler"])
            self._epoch = None


class ResumableBatches:
    """A batch sampler that begins where training is. It calls ``begun`` after the sampler has begun its epoch, before
    it returns the first batch."""

    def __init__(self, batches: Iterable[Sequence[int]], progress: EpochProgress, begun: Callable[[], None]) -> None:
        self._inner, self._progress, self._begun = batches, progress, begun

    def __iter__(self) -> Iterator[Sequence[int]]:
        for number, batch in enumerate(self._progress.open(self._inner)):
            if number == 0:
                self._begun()
            yield batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

"""RecordedSampler: deals the items of a stream in the first epoch, while they are recorded.

In the later epochs it is the `ShadeSampler` of the complete recording. In the first one it is that of a stand-in, which
has the same settings and place. Invariant: global batch k of the first epoch is the items [kG, (k+1)G) of the stream,
for any number of ranks, whether the recording is complete or not. So the place is one number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from shade.data._recorded.recorded import Recorded
from shade.data._sampler.place import Pass, check_place
from shade.data._sampler.sampler import ShadeSampler
from shade.data._sampler.settings import check_settings
from shade.errors import ConfigError, DataError
from shade.rank_group import ranks_of
from shade.sampling import num_steps, rank_slice

_STAND_IN_BATCHES = 4


class RecordedSampler(ShadeSampler):
    """Yields this rank's sample indices of one epoch of a `Recorded`: in the stream's order in epoch 0, where it waits
    for what is not recorded yet; in the later ones as a `ShadeSampler` does.

    Args:
        dataset: A `ShadeDataset` of a `Recorded`, or the `Recorded` itself.
        num_replicas: Ranks; from torch.distributed when None.
        rank: This rank; from torch.distributed when None.
        batch_size: Per rank; the same number that the DataLoader gets.
        **later: Arguments of the `ShadeSampler`, such as ``mode`` and ``seed``.

    Raises:
        ConfigError: No `Recorded`, or an argument that `ShadeSampler` refuses.
    """

    def __init__(
        self, dataset: Any, num_replicas: int | None = None, rank: int | None = None, *, batch_size: int, **later: Any
    ) -> None:
        recorded = getattr(dataset, "source", dataset)
        if not isinstance(recorded, Recorded):
            cure = "use ShadeSampler for other data"
            raise ConfigError.of("a Recorded, or a ShadeDataset of one", type(recorded).__name__, cure)
        self._recorded, self._recorded_dataset = recorded, dataset
        self._arguments = later | {"num_replicas": num_replicas, "rank": rank, "batch_size": batch_size}
        self._is_first, self._says_epochs, self._tail = True, False, (sys.maxsize, 1.0)
        # A mistake in the arguments shows now, and not after the first epoch.
        self._stand_in = range(_STAND_IN_BATCHES * batch_size * ranks_of(num_replicas, rank, batch_size)[0])
        super().__init__(self._stand_in, **self._arguments)

    def _turn(self, *, is_first: bool) -> None:
        """Becomes the sampler of the first epoch, or that of the later ones, for which all is recorded."""
        if is_first != self._is_first:
            if not is_first:
                self._recorded.record()
            self.close()
            super().__init__(self._stand_in if is_first else self._recorded_dataset, **self._arguments)
            self._is_first = is_first

    @override
    def set_epoch(self, epoch: int) -> None:
        self._turn(is_first=epoch == 0)
        self._says_epochs = True
        super().set_epoch(epoch)

    @override
    def weights(self, indices: torch.Tensor) -> torch.Tensor:
        if not self._is_first:
            return super().weights(indices)
        self._usage.made.add("weights")
        return torch.where(indices >= self._tail[0], self._tail[1], 1.0).to(torch.float32)

    @override
    def report(self, indices: torch.Tensor, losses: torch.Tensor) -> None:
        if not self._is_first:
            return super().report(indices, losses)
        # It counts the step alone: which losses there will be is not known.
        self.place.reported()

    @override
    def __len__(self) -> int:
        if not self._is_first:
            return super().__len__()
        len(self._recorded)
        return sum(len(self._part(step) or ()) for step in range(self.place.first_step, self.num_steps))

    @property
    @override
    def num_steps(self) -> int:
        if not self._is_first:
            return super().num_steps
        # No epoch has as many as a stream of unknown length.
        num_drawn = len(self._recorded) if self._recorded.is_complete else sys.maxsize
        return num_steps(num_drawn, self.global_batch, drop_last=self.drop_last)

    @override
    def _begin_pass(self, is_placed: bool) -> tuple[int, Iterator[int]]:
        place, generators = self.place, getattr(self._recorded_dataset, "generators", None)
        if self._is_first:
            is_over = place.first_step > 0 and place.is_over(self.num_steps, is_placed=is_placed)
            if is_over or (place.has_trained and place.has_begun and not self._says_epochs):
                self._turn(is_first=False)
                self.place.turn_to(1)
        if generators is not None:
            generators.follow(self.seed, self.epoch)
        if not self._is_first:
            return super()._begin_pass(is_placed)
        is_first = not place.has_begun
        place.rewind()
        mine = place.begin(self.num_steps, is_first=is_first)
        return mine.first_step * self.batch_size, self._stream(mine)

    def _stream(self, mine: Pass) -> Iterator[int]:
        """Yields this rank's part of the rest of the stream."""
        for step in self.place.steps(mine):
            part = self._part(step)
            if part is None:
                # The step was counted as dealt before it was known that the stream has ended.
                mine.num_dealt, mine.num_steps, mine.has_ended = mine.num_dealt - 1, step, True
                return
            yield from part

    def _part(self, step: int) -> list[int] | None:
        """Waits for a global batch; returns this rank's items of it, or None behind the stream's end."""
        start, num_ranks = step * self.global_batch, self.num_replicas
        stop = self._recorded.reach(start + self.global_batch)
        size = stop - start
        if size <= 0 or (size < self.global_batch and self.drop_last):
            return None
        mine = rank_slice(step, self.rank, num_drawn=stop, global_batch=self.global_batch, world_size=num_ranks)
        if size < self.global_batch:
            # DDP averages ranks and not samples, so an unevenly shared last step is corrected for.
            self._tail = start, len(mine) * num_ranks / max(size, num_ranks)
        return [index % stop for index in mine]

    def __repr__(self) -> str:
        """Returns what is recorded, and how far training is."""
        if not self._is_first:
            return f"Recorded{super().__repr__()[len('Shade') :]}"
        ranks = f"batch_size={self.batch_size}, rank={self.rank} of {self.num_replicas}"
        return f"RecordedSampler({self._recorded!r}, {ranks}, epoch=0, step={self.place.steps_shown})"

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._is_first:
            settings = {name: value for name, value in self._settings.items() if name != "num_samples"}
            state: dict[str, Any] = {"settings": settings, "epoch": 0} | self.place.state_dict()
            count = min(state["steps_done"] * self.global_batch, self._recorded.num_readable)
        else:
            state, count = super().state_dict(), len(self._recorded)
        return state | {"recorded": {"count": count, "digest": self._recorded.digest_of(count)}}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["epoch"] == 0:
            check_settings(state["settings"] | {"num_samples": self.num_samples}, self._settings)
        count, digest = state["recorded"]["count"], state["recorded"]["digest"]
        # On a machine without the recording it is made up to here.
        if self._recorded.reach(count) < count or self._recorded.digest_of(count) != digest:
            expected, cure = (
                f"the recording that training was at item {count} of",
                "name its folder; or begin a new run",
            )
            raise DataError.of(expected, repr(self._recorded), cure)
        self._turn(is_first=state["epoch"] == 0)
        if not self._is_first:
            return super().load_state_dict(state)
        check_place(state)
        self.place.turn_to(0, int(state["steps_done"]))

"""RecordedSampler: deals the items of a stream in the first epoch, while they are recorded; then it is a `ShadeSampler`.

Invariant: global batch k of the first epoch is the items [kG, (k+1)G) of the stream, for any number of ranks, whether
the recording is complete or not. So the place is one number.

Legend: N items of the stream · B batch of one rank · G global batch = B·W · W ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from shade.data._recorded.recorded import Recorded
from shade.data._sampler.place import Pass, Place, SamplerIterator, check_place
from shade.data._sampler.sampler import ShadeSampler
from shade.data._sampler.settings import check_settings
from shade.data._sampler.usage import UsageWarnings
from shade.errors import ConfigError, DataError
from shade.rank_group import ranks_of
from shade.sampling import num_steps, rank_slice

_STAND_IN_BATCHES = 4


class RecordedSampler(Sampler[int]):
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
        recorded = getattr(getattr(dataset, "source", None), "recorded", dataset)
        if not isinstance(recorded, Recorded):
            raise ConfigError.of(
                "a Recorded, or a ShadeDataset of one", type(recorded).__name__, "use ShadeSampler for other data"
            )
        self.num_replicas, self.rank, _ = ranks_of(num_replicas, rank, batch_size)
        self.batch_size, self.global_batch = batch_size, batch_size * self.num_replicas
        self._arguments = {"num_replicas": num_replicas, "rank": rank, "batch_size": batch_size} | later
        # A mistake would show after the first epoch.
        stand_in = ShadeSampler(range(_STAND_IN_BATCHES * self.global_batch), **self._arguments)
        settings: dict[str, Any] = stand_in.state_dict()["settings"]
        self._settings = {name: value for name, value in settings.items() if name != "num_samples"}
        stand_in.close()
        self._dataset, self._recorded = dataset, recorded
        self._drops_last, self._seed = bool(later.get("drop_last", False)), int(later.get("seed", 0))
        self._first = Place(UsageWarnings(), batch_size)
        self._later: ShadeSampler | None = None
        self._says_epochs = False
        self._tail = (sys.maxsize, 1.0)

    # ── the calls of a training loop ────────────────────────────────────────────────────────────────────────────────

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch, as with DistributedSampler. Any but the first needs the whole stream, and records the
        rest of it."""
        self._says_epochs = True
        if epoch > 0:
            self._later_sampler().set_epoch(epoch)
            return
        self.close()
        self._first.say(0)

    @property
    def epoch(self) -> int:
        """The present epoch, or the one that begins next; may be set, as DistributedSampler's."""
        return self.place.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def place(self) -> Place:
        """Where training is in the stream."""
        return self._first if self._later is None else self._later.place

    def weights(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns gradient weights of samples, as `ShadeSampler.weights`; 1 in the first epoch, but where its last step
        is shared unevenly.

        Args:
            indices: int64 (B,), as they came with the batch, on any device.

        Returns:
            float32 (B,) on the same device.
        """
        if self._later is not None:
            return self._later.weights(indices)
        start, balance = self._tail
        return torch.where(indices >= start, balance, 1.0).to(torch.float32)

    def report(self, indices: torch.Tensor, losses: torch.Tensor) -> None:
        """Reports the losses of one batch; once a step on every rank. In the first epoch it counts the step alone.

        Args:
            indices: int64 (B,), as they came with the batch.
            losses: float (B,), unweighted, on any device.
        """
        if self._later is not None:
            self._later.report(indices, losses)
        else:
            self._first.reported()

    def count_step(self) -> None:
        """Says that a step of training is done, in a loop that does not report; a `Checkpointer` does."""
        self.place.count_step()

    # ── one epoch ───────────────────────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        """Returns how many samples this rank takes in the present epoch, or in the rest of it; raises TypeError in the
        first one while that is not known."""
        if self._later is not None:
            return len(self._later)
        len(self._recorded)
        steps = range(self._first.first_step, self.num_steps)
        last = [len(self._part(step) or ()) for step in steps[-1:]]
        return max(0, len(steps) - 1) * self.batch_size + sum(last)

    @property
    def num_steps(self) -> int:
        """Returns the steps of the present epoch, the same on every rank; a number that no epoch has while it is not
        known."""
        if self._later is not None:
            return self._later.num_steps
        if not self._recorded.is_complete:
            return sys.maxsize // self.global_batch
        return num_steps(len(self._recorded), self.global_batch, drop_last=self._drops_last)

    @property
    def steps_done(self) -> int:
        """Returns the steps of the present epoch whose losses were reported; without a report, those whose batches the
        loop has got from its loader."""
        return self.place.steps_done

    def __iter__(self) -> SamplerIterator:
        return SamplerIterator(self, self._begin)

    def _begin(self, is_placed: bool) -> tuple[int, Iterator[int]]:
        """Begins a pass, when its first index is asked for."""
        first = self._first
        if self._later is None:
            is_over = first.first_step > 0 and first.is_over(self.num_steps, is_placed=is_placed)
            if is_over or (first.has_trained and first.has_begun and not self._says_epochs):
                self._later_sampler().place.turn_to(1)
        if self._later is not None:
            begun = self._later.begin_pass(is_placed)
            self._follow(self._later.epoch)
            return begun
        is_first = not first.has_begun
        first.rewind()
        self._follow(0)
        mine = first.begin(self.num_steps, is_first=is_first)
        return mine.first_step * self.batch_size, self._pass(mine)

    def _follow(self, epoch: int) -> None:
        """Sets the epoch of the random transforms."""
        generators = getattr(self._dataset, "generators", None)
        if generators is not None:
            generators.follow(self._seed, epoch)

    def _pass(self, mine: Pass) -> Iterator[int]:
        """Yields this rank's part of the rest of the stream."""
        for step in self._first.steps(mine):
            part = self._part(step)
            if part is None:
                # The step was counted as dealt before it was known that the stream has ended.
                mine.num_dealt, mine.num_steps, mine.has_ended = mine.num_dealt - 1, step, True
                return
            yield from part

    def _part(self, step: int) -> list[int] | None:
        """Waits for a global batch; returns this rank's items of it, or None behind the stream's end."""
        start = step * self.global_batch
        stop = self._recorded.reach(start + self.global_batch)
        size = stop - start
        if size <= 0 or (size < self.global_batch and self._drops_last):
            return None
        ranks = {"global_batch": self.global_batch, "world_size": self.num_replicas}
        mine = rank_slice(step, self.rank, num_drawn=stop, **ranks)
        if size < self.global_batch:
            # DDP averages ranks and not samples, so an unevenly shared last step is corrected for.
            self._tail = start, len(mine) * self.num_replicas / max(size, self.num_replicas)
        return [index % stop for index in mine]

    def _later_sampler(self) -> ShadeSampler:
        if self._later is None:
            self._recorded.record()
            self._later = ShadeSampler(self._dataset, **self._arguments)
        return self._later

    def __repr__(self) -> str:
        """Returns the sampler of the present epoch."""
        if self._later is not None:
            return f"RecordedSampler({self._later!r})"
        ranks = f"batch_size={self.batch_size}, rank={self.rank} of {self.num_replicas}"
        return f"RecordedSampler({self._recorded!r}, {ranks}, epoch=0, step={self._first.steps_shown})"

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Returns all that decides the rest of the stream, as plain numbers and tensors. Call it between steps."""
        if self._later is not None:
            state, count = self._later.state_dict(), len(self._recorded)
        else:
            state = {"settings": dict(self._settings), "epoch": 0} | self._first.state_dict()
            count = min(state["steps_done"] * self.global_batch, self._recorded.num_recorded)
        return state | {"recorded": {"count": count, "digest": self._recorded.digest_of(count)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a `state_dict`, on any number of ranks with the same global batch. What it needs of the stream
        and is not recorded here is recorded first.

        Raises:
            ConfigError: The state belongs to other settings.
            DataError: It belongs to another recording.
        """
        check_place(state)
        count, epoch = int(state["recorded"]["count"]), int(state["epoch"])
        if epoch == 0:
            check_settings(state["settings"], self._settings)
        if self._recorded.reach(count) < count or self._recorded.digest_of(count) != state["recorded"]["digest"]:
            raise DataError.of(
                f"the recording that training was at item {count} of",
                repr(self._recorded),
                "name its folder, or begin a new run",
            )
        if epoch > 0:
            self._later_sampler().load_state_dict(state)
            return
        self.close()
        self._first.turn_to(0, int(state["steps_done"]))

    def at_resume(self, action: Any) -> None:
        """Calls an action when the rest of an interrupted epoch begins, as `ShadeSampler.at_resume`."""
        self.place.at_resume(action)

    def close(self) -> None:
        """Closes the later epochs' sampler. Safe to call twice."""
        if self._later is not None:
            self._later.close()
            self._later = None

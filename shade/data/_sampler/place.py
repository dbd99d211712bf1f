"""Keeps where training is in the stream: the events that move the place, and what they move.

docs/explanation/place.md has the table that this module follows.

*Dealt* batches were handed out; workers ask for them ahead of training. The loop has *got* a batch when its loader
yielded it. A batch is *done* when its losses were reported or, in a loop that reports nothing, when the loop has got
it. A checkpoint of the training needs the steps that are done.

Invariant: an iterator that was set to n returns index n of this rank's epoch next, and then the rest up to the end.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shade.data._sampler.dealt_batches import DealtBatches
from shade.data._sampler.usage import UsageWarnings
from shade.errors import ConfigError

_CALLERS = 9
"""Calls between the loader's iterator and `LoaderCount.of_caller`, at most."""


class LoaderCount:
    """Counts the batches that a loop gets from a DataLoader's iterator, whose workers ask for more than that."""

    def __init__(self, iterator: _BaseDataLoaderIter) -> None:
        # Not the iterator itself, which ends when the loop drops it.
        self._attributes = vars(iterator)
        num_workers = self._attributes["_num_workers"]
        if num_workers > 1 and not self._attributes.get("_in_order", True):
            raise ConfigError.of(
                "batches in the order in which the sampler deals them, so that a resume knows which are left",
                f"in_order=False with {num_workers} workers",
                "leave in_order out of the loader",
            )
        self._num_got_before, self._num_asked_before = self._num_received, self._num_sent
        batches = self._attributes["_index_sampler"]
        self.batch_size: int | None = 1 if hasattr(batches, "place") else getattr(batches, "batch_size", None)
        """Samples of a batch; None if the user's own batch sampler decides."""
        self.is_over = False
        """Whether the loop has dropped the pass."""
        # Workers that stay have one iterator for all passes, and a new order in each.
        self._ends = [weakref.ref(iterator, self._end)]
        with contextlib.suppress(TypeError):  # an itertools object
            self._ends.append(weakref.ref(iterator._sampler_iter, self._end))

    @classmethod
    def of_caller(cls) -> LoaderCount | None:
        """Returns the count of the DataLoader's iterator that is asking; None if none is."""
        # DataLoader does not say who asks a sampler for indices, so its iterator is looked for among the callers.
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
        self.is_over, self._attributes = True, {"_rcvd_idx": self._num_received, "_send_idx": self._num_sent}

    @property
    def _num_received(self) -> int:
        # With workers, a batch whose loading failed counts as well: a loop that continues after the error has left it
        # out.
        return int(self._attributes["_rcvd_idx" if "_rcvd_idx" in self._attributes else "_num_yielded"])

    @property
    def _num_sent(self) -> int:
        # Without workers, a batch is yielded as soon as it is asked for.
        return int(self._attributes["_send_idx" if "_send_idx" in self._attributes else "_num_yielded"])

    def __call__(self) -> int:
        return self._num_received - self._num_got_before

    @property
    def num_asked(self) -> int:
        """Returns how many batches the iterator has asked for before the one that it is asking for."""
        return self._num_sent - self._num_asked_before


class FetchedAhead:
    """Finds how many batches a loop that reports nothing has got and not trained on yet, from the steps that it does.

    A loop that fetches L batches ahead has got A + L of them at its first step, and A more at each later one until none
    is left. One that accumulates gradients has got A at each.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        """Batches that the loop has got and not trained on."""
        self._num_got = self._num_first = self._num_steps = 0

    def is_unclear(self, known: tuple[int, int]) -> bool:
        """Returns whether the steps so far are those of a loop that accumulates and of one that fetches ahead."""
        return self._num_first > 1 and known == (0, 0)

    def step(self, num_got: int, is_last: bool, known: tuple[int, int]) -> tuple[int, int]:
        """Counts a step of training.

        Args:
            num_got: Batches that the loop has got in the pass.
            is_last: Whether it has got the last one.
            known: A and L, as far as they are known.

        Returns:
            A and L.
        """
        new, self._num_got = num_got - self._num_got, num_got
        self._num_steps += 1
        if self._num_steps == 1:
            self._num_first = new
        elif self._num_steps == 2 and (not is_last or new == self._num_first):
            known = new, max(0, self._num_first - new)
            self.num_waiting = known[1]
            return known
        if is_last and self._num_first > 1 and num_got == self._num_steps:
            # A pass of few steps shows it at its end: there was a step for each batch.
            known = 1, self._num_first - 1
        num_each, num_ahead = known
        self.num_waiting = min(num_ahead, max(0, self.num_waiting + new - num_each))
        return known


class Pass:
    """One iteration over what is left of an epoch.

    Args:
        first_step: Its first step.
        num_steps: Steps of the whole epoch.
        batch_size: Samples of this rank in a step.
        dealt: Knows of which step a batch is; None if reports do not say which batch they are of.
        count: Counts the batches that the loop has got; None if what asks for the indices is unknown.
        is_first: Whether no pass of the epoch came before it.
        overlaps: Whether another pass was under way when it began, so that reports may be of that one.
    """

    def __init__(
        self,
        first_step: int,
        num_steps: int,
        batch_size: int,
        dealt: DealtBatches | None,
        count: Callable[[], int] | None,
        *,
        is_first: bool,
        overlaps: bool,
    ) -> None:
        self.first_step, self.num_steps, self.dealt, self.count = first_step, num_steps, dealt, count
        self.is_first, self.overlaps = is_first, overlaps
        self.num_dealt = 0
        self.has_ended = self.is_reported = False
        self.is_regrouped = isinstance(count, LoaderCount) and count.batch_size not in (None, batch_size)
        """Whether the loader's batches are others than the sampler's."""
        self.ahead = FetchedAhead()

    def deal(self) -> None:
        """Counts a step whose first index is being asked for."""
        # Something between sampler and loader holds indices back, leaves some out, repeats them, or makes batches of
        # another size.
        if isinstance(self.count, LoaderCount) and self.count.num_asked != self.num_dealt:
            self.is_regrouped = True
        self.num_dealt += 1

    @property
    def num_got(self) -> int | None:
        """Returns how many batches of the sampler the loop has got; None if that is not known."""
        if self.count is None:
            return None
        num_got = self.count()
        if not self.is_regrouped and num_got <= self.num_dealt:
            return num_got
        # What was taken is known where nothing is under way.
        is_all = self.has_ended and isinstance(self.count, LoaderCount) and num_got == self.count.num_asked
        return self.num_steps - self.first_step if is_all else None

    @property
    def is_under_way(self) -> bool:
        """Returns whether a DataLoader's iterator still holds the pass."""
        return isinstance(self.count, LoaderCount) and not self.count.is_over

    @property
    def is_dropped(self) -> bool:
        """Returns whether the loop has dropped the DataLoader's iterator."""
        return isinstance(self.count, LoaderCount) and self.count.is_over

    @property
    def is_look(self) -> bool:
        """Returns whether the pass was a look at one batch, or at none: no loss was reported, and it has not ended."""
        num_got = self.num_got
        seen = self.num_dealt if num_got is None else num_got
        # Workers may have asked for the last index. Then one batch is no look where it is all that was left.
        is_whole = self.has_ended and self.first_step + seen >= self.num_steps
        return not self.is_reported and seen <= 1 and not is_whole

    @property
    def is_uncounted(self) -> bool:
        """Returns whether nothing says how far the loop has come."""
        return not (self.is_reported or (self.has_ended and not self.is_regrouped)) and self.num_got is None

    @property
    def next_step(self) -> int:
        """Returns the step that is dealt next, where reports can be of no other pass; else the epoch's end."""
        return self.first_step + self.num_dealt if self.is_first and not self.overlaps else self.num_steps


class Place:
    """The place of one rank in its stream: an epoch, and the steps of it that are done.

    Args:
        usage: The calls that the loop makes, and the warnings of those that it leaves out.
        batch_size: Samples of this rank in a step.
        counts_all: Whether every batch counts: a look at one, too, and a dealt one where nothing counts those that the
            loop gets.
    """

    def __init__(self, usage: UsageWarnings, batch_size: int, *, counts_all: bool = False) -> None:
        self.epoch = 0
        """The present epoch, or the one that begins next."""
        self.first_step = 0
        """Where the present pass began, or the next one begins."""
        self.newest: Pass | None = None
        """The pass that began last, perhaps of an epoch before the present one."""
        self.has_begun = False
        """Whether a pass of the present epoch has begun."""
        self.is_sought = False
        """Whether a loader that keeps its own place has set the place of this epoch."""
        self._usage, self._batch_size, self._counts_all = usage, batch_size, counts_all
        self._said: int | None = None
        self._was_placed = False
        self._pace = (0, 0)
        self._reported = 0
        self._unlocated: torch.Tensor | None = None
        self._num_passes = self._num_trained = self._num_live = 0
        self._at_resume: Callable[[], None] | None = None

    @property
    def _present(self) -> Pass | None:
        """Returns the newest pass if it is of the present epoch."""
        return self.newest if self.has_begun else None

    # ── the place is set ────────────────────────────────────────────────────────────────────────────────────────────

    def say(self, epoch: int) -> None:
        """Takes the epoch that the loop says it is in."""
        self._said = epoch
        if epoch != self.epoch:
            self.turn_to(epoch)

    def is_over(self, num_steps: int, *, is_placed: bool) -> bool:
        """Returns whether nothing is left of the present epoch, of so many steps, so that the pass that begins now is
        of the next one; ``is_placed`` if a loader has set the pass's own iterator to the end."""
        # Only a place that was loaded or sought lies here.
        if self.first_step < num_steps:
            return False
        was_placed, self._was_placed = self._was_placed, is_placed
        if self._said in (self.epoch, self.epoch + 1):
            # The workers of an ended iterator have asked for its end; the loop gets the next one, at the same place.
            self.has_begun = self.has_begun and not was_placed
            return self._said != self.epoch
        # Nothing follows first: a loop that counts epochs itself resumes with the one that was saved. A loader that
        # kept its place begins a new iterator after an ended one.
        return self.has_begun or (self.is_sought and not is_placed)

    def turn_to(self, epoch: int, first_step: int = 0) -> None:
        """Goes to an epoch, from whose ``first_step`` on training continues."""
        self.epoch, self.is_sought = epoch, False
        self._go_to(first_step)

    def seek(self, step: int) -> None:
        """Goes to a step of the present epoch, whether or not the losses of the steps before it were reported."""
        self._go_to(step)
        self.is_sought = True

    def _go_to(self, step: int) -> None:
        self.first_step = self._reported = step
        self._unlocated, self.has_begun, self._was_placed = None, False, False

    def rewind(self) -> None:
        """Sets the place before a pass begins: where the present epoch has trained, its beginning."""
        # A look at one batch leaves the place as it was.
        if self._present is not None and not self._present.is_look:
            self.first_step = 0
        if self.first_step == 0:
            self._at_resume = None
        elif self._at_resume is not None and self._num_live == 0:
            self._at_resume()

    def skip_reported(self) -> None:
        """Sets the place before a pass begins: behind the steps whose losses were reported."""
        if self.steps_reported > self.first_step:
            self.first_step = self.steps_reported

    def at_resume(self, action: Callable[[], None]) -> None:
        """Calls an action when the rest of an interrupted epoch begins; not if another epoch begins instead."""
        self._at_resume = action

    # ── a pass ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, num_steps: int, dealt: DealtBatches | None = None, *, is_first: bool = True) -> Pass:
        """Begins a pass at `first_step`, of an epoch of so many steps; ``is_first`` as for `Pass`."""
        before = self.newest
        overlaps = self._num_live > 0 or (before is not None and before.is_under_way)
        count = LoaderCount.of_caller()
        self.newest = Pass(
            self.first_step, num_steps, self._batch_size, dealt, count, is_first=is_first, overlaps=overlaps
        )
        self.has_begun, self._reported, self._unlocated = True, self.first_step, None
        self._num_passes += 1
        # A resume may find that nothing is left of its epoch.
        self._num_trained += self.first_step < num_steps
        return self.newest

    def steps(self, mine: Pass) -> Iterator[int]:
        """Yields the steps of a pass, until it ends or is dropped; those of the newest pass count as dealt."""
        self._num_live += 1
        try:
            for step in range(mine.first_step, mine.num_steps):
                if mine is self.newest:
                    mine.deal()
                yield step
        finally:
            self._num_live -= 1
        if self.newest is not None:
            self.newest.has_ended = True

    def count_batches(self, count: Callable[[], int]) -> None:
        """Takes the count of the batches that the loop gets in the newest pass, from a loader that knows it."""
        if self.newest is not None:
            self.newest.count = count

    def count_step(self) -> None:
        """Hears that training has done a step."""
        mine = self._present
        num_got = None if mine is None else mine.num_got
        if mine is not None and num_got is not None:
            is_last = mine.first_step + num_got >= mine.num_steps
            self._pace = mine.ahead.step(num_got, is_last, self._pace)

    # ── a report ────────────────────────────────────────────────────────────────────────────────────────────────────

    def locate(self, indices: torch.Tensor) -> int | torch.Tensor:
        """Returns the steps that are done when a batch's losses are reported, for `reported`; moves nothing.

        Args:
            indices: int64 (B,), of the batch; returned as they are if they are on a device, which is not waited for.

        Returns:
            The steps, or the indices.

        Raises:
            ConfigError: The samples are of no batch of this pass, or of another one than was handed out.
        """
        mine = self._present
        if mine is None or mine.dealt is None or not len(indices):
            return self._reported + 1
        # Two batches show whether ranks are dealt every W-th of their own batches.
        if self._reported < 2 and not mine.overlaps:
            mine.dealt.check_order(indices, self._reported)
        return self._located(mine, mine.dealt, indices) if indices.is_cpu else indices

    def _located(self, mine: Pass, dealt: DealtBatches, indices: torch.Tensor) -> int:
        try:
            step, is_whole = dealt.step_of(indices.numpy(), self._reported, mine.next_step)
        except ConfigError:
            # The samples may be of a pass that began before this one, perhaps in another epoch.
            if mine.overlaps:
                return self._reported
            raise
        if not is_whole and not mine.overlaps:
            self._usage.warn_of_part(len(indices), dealt.batch_size)
        return step + is_whole

    def reported(self, located: int | torch.Tensor | None = None) -> None:
        """Counts a report: of a batch that `locate` found, or of the next one."""
        mine, next_one = self._present, self._reported + 1
        if located is None and mine is not None:
            # A batch may be reported twice.
            next_one = min(next_one, mine.num_steps)
        self._reported = located if isinstance(located, int) else next_one
        self._unlocated = located if isinstance(located, torch.Tensor) else None
        if mine is not None:
            mine.is_reported = True

    # ── what is done ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def steps_reported(self) -> int:
        """Returns the steps of the present epoch whose losses were reported, those before a resume included."""
        mine = self._present
        if self._unlocated is not None and mine is not None and mine.dealt is not None:
            indices, self._unlocated = self._unlocated.cpu(), None
            self._reported = self._located(mine, mine.dealt, indices)
        return self._reported

    @property
    def steps_done(self) -> int:
        """Returns the steps of the present epoch whose losses were reported; without a report, those whose batches the
        loop has got."""
        mine = self._present
        if mine is None or mine.is_reported:
            return self.steps_reported
        num_got = mine.num_dealt if mine.count is None and self._counts_all else mine.num_got
        if num_got is None or (mine.is_dropped and mine.is_look and not self._counts_all):
            return self._reported
        return min(mine.first_step + num_got - mine.ahead.num_waiting, mine.num_steps)

    @property
    def steps_shown(self) -> int:
        """Returns the steps that are known to be done without waiting for a device."""
        return self._reported

    @property
    def has_trained(self) -> bool:
        """Returns whether the passes so far were more than a look at the data."""
        if self.newest is None or self._num_trained == 0:
            return False
        was_left = self._num_passes == 1 and not self.newest.has_ended and "report" not in self._usage.made
        return not was_left and (self._present is None or not self._present.is_look)

    @property
    def has_pass(self) -> bool:
        """Returns whether a pass has ever begun."""
        return self._num_passes > 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the place between two steps: ``steps_done``; of the node of torchdata that asks, if one does.
        ``inside_batch`` is there if some indices of a batch are missing."""
        # A node reads ahead of training, and keeps the state with what was made of the indices that it has.
        node = sys._getframe(2).f_locals.get("self")
        asking = getattr(node, "_it", None) if type(node).__module__ == "torchdata.nodes.adapters" else None
        if isinstance(asking, SamplerIterator) and asking.has_begun:
            return asking.place_between_batches()
        mine = self._present
        if (
            mine is not None
            and mine.is_uncounted
            and mine.num_dealt > 1
            and (mine.is_regrouped or not self._counts_all)
        ):
            self._usage.warn_of_place(self._reported)
        if mine is not None and not mine.is_reported and mine.ahead.is_unclear(self._pace):
            self._usage.warn_of_fetched_ahead(self.steps_done)
        return {"steps_done": self.steps_done}


def check_place(state: dict[str, Any]) -> None:
    """Raises ConfigError for a sampler's state that was taken inside a batch."""
    if state.get("inside_batch"):
        raise ConfigError.of(
            "a place between two batches",
            f"one inside the batch before step {state['steps_done']}",
            "give loader and sampler one batch_size",
        )


class PlacedSampler(Protocol):
    """A sampler as its iterators know it; `ShadeSampler` and `MixtureSampler` are such."""

    batch_size: int
    """Batch of one rank. A place is saved with it, so that other ranks can find it."""
    place: Place

    @property
    def num_steps(self) -> int:
        """Returns the steps of a whole pass."""
        ...


class SamplerIterator(Iterator[Any]):
    """An iterator over this rank's indices; the sampler does the work.

    Args:
        sampler: The sampler.
        begin: Begins the pass, given whether the iterator was set to a place; returns how many indices were
            taken before it, and the rest.
    """

    def __init__(self, sampler: PlacedSampler, begin: Callable[[bool], tuple[int, Iterator[Any]]]) -> None:
        self._sampler, self._begin = sampler, begin
        self._rest: Iterator[Any] | None = None
        self._num_taken: int | None = None
        self._epoch: int | None = None
        self._is_placed = False

    def __next__(self) -> Any:
        # Not before the first index is asked for: loaders that keep their place make more iterators than they use.
        if self._rest is None:
            self._num_taken, self._rest = self._begin(self._is_placed)
            self._epoch = self._sampler.place.epoch
        index = next(self._rest)
        assert self._num_taken is not None, "it has begun"
        self._num_taken += 1
        return index

    @property
    def has_begun(self) -> bool:
        """Returns whether the iterator has a place: its pass has begun, or it was set to one."""
        return self._num_taken is not None

    def place_between_batches(self) -> dict[str, Any]:
        """Returns the place behind the indices that were taken, as `Place.state_dict` does."""
        step, is_between = self._step_after(self._num_taken or 0, self._sampler.batch_size)
        return {"steps_done": step} if is_between else {"steps_done": step, "inside_batch": True}

    def _step_after(self, num_taken: int, batch_size: int) -> tuple[int, bool]:
        """Returns the first step of which no index was taken, and whether a batch ends before it."""
        step = -(-num_taken // batch_size)
        return step, num_taken % batch_size == 0 or step == self._sampler.num_steps

    def state_dict(self) -> dict[str, Any]:
        """Returns how many indices of this rank's epoch were taken; None before the pass has begun."""
        # Not the steps that are done: torchdata's `StatefulDataLoader`, which asks for this, restores its batches
        # itself.
        # The epoch, because a loop may say the next one before its loader's state is saved.
        return {
            "num_taken": self._num_taken,
            "batch_size": self._sampler.batch_size,
            "epoch": self._epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the place of a `state_dict`. Load the sampler's state, which holds the epoch, before.

        Raises ConfigError if the place lies inside a batch.
        """
        if state["num_taken"] is None or state["epoch"] != self._sampler.place.epoch:
            return
        step, is_between = self._step_after(state["num_taken"], state["batch_size"])
        if not is_between:
            raise ConfigError.of(
                "a place between two batches", f"step {step}", "give loader and sampler one batch_size"
            )
        self._sampler.place.seek(step)
        self._num_taken, self._epoch, self._is_placed = state["num_taken"], state["epoch"], True

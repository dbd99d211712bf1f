"""ShadeSampler: takes DistributedSampler's place in the script, and plans the cache.

It draws the global order of each epoch from the importance of the samples, hands every rank its part of every global
batch, and plans the cache's residents by an order that it knows one epoch ahead. When epoch e begins, e is drawn
already, and modes that draw ahead draw e+1 from the scores of that moment. With both orders known, the residency plan
of e is exact, and every rank computes the same one. Price: scores are up to an epoch old when they are used, which
changes the variance of the gradient and not its mean (decision 0004).

Three calls of the loop carry the method: `set_epoch` (or every epoch is the same), `report` (or no sample is important)
and `weights` (or the gradient is biased). A loop without them runs and looks healthy, so the sampler warns once of each
missing call when the second epoch begins, and names the line to add (`UsageWarnings`).

Invariant: the global order depends on seed, epoch, reported losses and global batch alone. Ranks, workers and the state
of the cache change which process fetches a sample and from where, never which sample comes when.

Legend: N data set · K drawn in an epoch · B batch of one rank · G global batch = B·W · W ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from shade.cache.cache import SampleCache
from shade.data._sampler.cache_planner import ENDING_BATCHES, CachePlanner
from shade.data._sampler.place import (
    LOOK_AHEAD_STEPS,
    LoaderCount,
    SamplerIterator,
    check_order,
    check_place,
    place_of_node,
)
from shade.data._sampler.rank_shard import RankShard
from shade.data._sampler.saved_draws import SavedDraws, SharedDraws, draw_from, load_draw
from shade.data._sampler.shuffle_window import ShuffleWindow
from shade.data._sampler.usage import ForgottenCallWarning as ForgottenCallWarning
from shade.data._sampler.usage import UsageWarnings, check_numbering, check_wrapping
from shade.errors import ConfigError
from shade.importance import ImportanceTable, ScoreMerger
from shade.policy.base import EpochPlan
from shade.rank_group import SingleProcessGroup, current_group, ranks_of
from shade.sampling import MODES
from shade.sampling.base import LARGE, LARGE_ORDER, Draw, Receipt, Scores, Validation, is_large
from shade.types import Floats, Order

_READ_AHEAD = 1 << 20
"""A number that no worker has, of what reads ahead."""


class ShadeSampler(DistributedSampler[int]):
    """Yields this rank's sample indices of one epoch.

    It takes the arguments of `torch.utils.data.DistributedSampler`, and its own by keyword. With a `ShadeDataset` it
    plans the data set's cache; with any other data set it only samples. It is a DistributedSampler by class, so
    frameworks that give every loader one (Lightning) keep it, and set its epoch.

    Args:
        dataset: The data set that the DataLoader reads.
        num_replicas: Ranks; from torch.distributed when None.
        rank: This rank; from torch.distributed when None.
        shuffle: False: the drawn samples in ascending order.
        seed: The same on every rank.
        drop_last: True: the tail that does not fill a global batch is left out.
        batch_size: Per rank; the same number that the DataLoader gets.
        mode: ``"unbiased"``, ``"pads"`` or ``"uniform"``, described in `shade.sampling`.
        keep: `unbiased` only: mean inclusion probability, in (0, 1]; 0.7 when None.
        replication_factor: `pads` only: how often cached samples appear, ≥ 1 in steps of 0.5.
        epochs: Total number of epochs, if known: `unbiased` then ends with full epochs.
        score: What makes a sample important, a name of `shade.importance.SCORES`; the mode's own choice when None.
        shuffle_window: For `Shards`: neighbours in a shard come within so many places of each other, so that a block of
            them is read once and need not be kept (`shade.sampling.window`). None: a globally random order.
        follow: A name; jobs that give the same one, on the same data and cache, take one stream of samples in step, and
            one of them reads the origin for all (`shade.cache.coordinated_read`).

    Raises:
        ConfigError: An argument out of range, or one that the mode does not take.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        batch_size: int,
        mode: str = "unbiased",
        keep: float | None = None,
        replication_factor: float | None = None,
        epochs: int | None = None,
        score: str | None = None,
        shuffle_window: int | None = None,
        follow: str | None = None,
    ) -> None:
        self.num_replicas, self.rank, distributed = ranks_of(num_replicas, rank, batch_size)
        self.num_samples = len(dataset)
        self.batch_size, self.shuffle, self.seed, self.drop_last = batch_size, shuffle, seed, drop_last
        self._check(distributed)
        check_wrapping(dataset)
        self.global_batch = batch_size * self.num_replicas
        mode_class = MODES.get(mode)
        source = getattr(dataset, "source", None)
        asked = {"keep": keep, "replication_factor": replication_factor}
        known = {"epochs": epochs, "targets_N": getattr(source, "target_N", None)}
        accepted = inspect.signature(mode_class).parameters
        for name, value in asked.items():
            if value is not None and name not in accepted:
                raise ConfigError.of(f"no {name} with mode {mode!r}", value, f"leave {name} out or choose another mode")
        options = {name: value for name, value in (asked | known).items() if value is not None and name in accepted}
        self._mode = mode_class(self.num_samples, self.global_batch, seed, **options)
        self._settings = {
            "mode": mode,
            "seed": seed,
            "num_samples": self.num_samples,
            "global_batch": self.global_batch,
        }
        self._settings |= {"shuffle": shuffle, "drop_last": drop_last}
        self._settings |= {} if shuffle_window is None else {"shuffle_window": shuffle_window}
        self._settings |= {name: value for name, value in options.items() if name != "targets_N"}
        if is_large(self.num_samples):
            self._settings["order"] = LARGE_ORDER
        if self.num_replicas > 1 and not distributed and self._mode.uses_scores:
            raise ConfigError.of(
                "torch.distributed to be initialised: ranks merge their losses through it",
                f"num_replicas={self.num_replicas}",
                "call torch.distributed.init_process_group('gloo') first, or use mode='uniform'",
            )
        self._table = ImportanceTable(self.num_samples, score, self._mode.default_score)
        self._merger = ScoreMerger(self._table, batch_size)
        cache: SampleCache | None = getattr(dataset, "cache", None)
        joined = distributed and self.num_replicas > 1
        talks = joined and (cache is not None or shuffle_window is not None or is_large(self.num_samples))
        self._group = current_group("the sampler's plans") if talks else SingleProcessGroup()
        """For the training thread; the merger's thread has its own."""
        self._planner: CachePlanner | None = None
        if cache is not None:
            policy = getattr(dataset, "policy", None) or self._mode.default_policy
            self._planner = CachePlanner(
                cache,
                policy,
                *(self._mode.draws_ahead, self.rank, self.num_replicas, self._group),
                global_batch=self.global_batch,
                follow=follow,
            )
        elif follow is not None:
            raise ConfigError.of(
                "a ShadeDataset with a cache, to follow one stream", type(dataset).__name__, "give it one"
            )
        self._window = None if shuffle_window is None else self._opened_window(dataset, shuffle_window, cache)
        self._shared = SharedDraws(self.num_samples, self._group) if joined and is_large(self.num_samples) else None
        self._last_epoch = None if epochs is None else epochs - 1
        self.epoch = 0
        self._draws: dict[int, Draw] = {}
        self._saved = SavedDraws()
        self._first_step = self._steps_done = 0
        self._begun = self._is_placed = False
        self._shard = RankShard(self.rank, self.num_replicas, batch_size, drop_last)
        self._accuracies: list[float] = []
        self._weight_N: Floats | None = None
        self._usage_warnings = UsageWarnings()
        self._iterations = self._num_passes = 0
        self._has_ended = self._overlaps = self._is_reported = self._is_first = False
        self._num_live = self._num_dealt = 0
        self._count: Callable[[], int] | None = None
        self._unchecked = dataset
        self._unplaced: torch.Tensor | None = None
        self._generators = getattr(dataset, "generators", None)
        self._follows = False  # a training loop may set the epoch of the random transforms itself
        self._at_resume: Callable[[], None] | None = None

    def _check(self, distributed: bool) -> None:
        if self.batch_size * self.num_replicas > self.num_samples:
            raise ConfigError.of(
                f"batch_size × ranks of at most {self.num_samples}, the size of the data set",
                f"{self.batch_size} × {self.num_replicas}",
                "choose a smaller batch size",
            )
        if self.num_replicas > 1 and distributed and dist.get_world_size() != self.num_replicas:
            raise ConfigError.of(
                f"num_replicas equal to the world size {dist.get_world_size()}", self.num_replicas, "leave it out"
            )

    def _opened_window(self, dataset: Any, window: int, cache: SampleCache | None) -> ShuffleWindow:
        if not self.shuffle:
            raise ConfigError.of("shuffle=True with a shuffle_window", False, "leave one of the two out")
        count = None if cache is None else cache.for_thread(_READ_AHEAD).count_origin
        return ShuffleWindow(dataset, window, self.seed, self.global_batch, group=self._group, count=count)

    # ── the calls of a training loop ────────────────────────────────────────────────────────────────────────────────

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch, as with DistributedSampler. After `load_state_dict` the interrupted epoch resumes where
        it stopped; any other starts from its beginning."""
        self._usage_warnings.made.add("set_epoch")
        if epoch != self.epoch:
            self._turn_to(epoch)

    def _turn_to(self, epoch: int) -> None:
        self.epoch, self._first_step, self._steps_done, self._unplaced = epoch, 0, 0, None
        self._begun = self._is_placed = self._is_reported = False

    def weights(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns gradient weights of samples of the present epoch: multiply the per-sample losses by them, then
        average.

        Args:
            indices: int64 (B,), as they came with the batch, on any device.

        Returns:
            float32 (B,) on the same device.

        Raises:
            ConfigError: An index that is outside the data set.
        """
        self._usage_warnings.made.add("weights")
        if self._weight_N is None and not indices.is_cpu:
            return torch.ones(len(indices), dtype=torch.float32, device=indices.device)
        index_B = indices.cpu().numpy()
        if len(index_B) and not 0 <= index_B.min() <= index_B.max() < self.num_samples:
            raise ConfigError.of(
                f"indices of the data set's {self.num_samples} samples",
                f"{index_B.min()} … {index_B.max()}",
                "pass the indices that came with the batch",
            )
        if self._weight_N is None:
            return torch.ones(len(index_B), dtype=torch.float32)
        return torch.from_numpy(self._weight_N[index_B]).to(indices.device)

    def report(self, indices: torch.Tensor, losses: torch.Tensor) -> None:
        """Reports the losses of one batch; once a step on every rank. Does not wait for the device or the network.

        The indices say which step this is, so a batch may be reported again, in parts, or not at all. A step counts as
        done when its last sample is reported.

        Args:
            indices: int64 (B,), as they came with the batch.
            losses: float (B,), unweighted, on any device; detached here.

        Raises:
            ConfigError: Not one loss for each index, or indices that are not of one batch of this epoch.
        """
        self._usage_warnings.made.add("report")
        if not isinstance(indices, torch.Tensor):
            return self._merger.report(indices, losses)  # which refuses it
        if self._unchecked is not None:
            check_numbering(self._unchecked)
            self._unchecked = None
        if self.num_replicas > 1 and self._steps_done < 2 and self._begun and len(indices) and not self._overlaps:
            order_K = self._draw(self.epoch).order_K
            steps = range(self._steps_done, min(self.num_steps, self._steps_done + LOOK_AHEAD_STEPS))
            check_order(int(indices[0]), self._steps_done, self._shard.dealt(order_K, steps))
        if self._begun and len(indices) and indices.is_cpu:
            num_done, self._unplaced = self._done_after(indices), None
        else:
            num_done, self._unplaced = self._steps_done + 1, indices if self._begun and len(indices) else None
        self._merger.report(indices, losses)
        self._steps_done, self._is_reported = num_done, self._begun

    def _done_after(self, indices: torch.Tensor) -> int:
        """Returns how many steps are done, by the samples that were reported last."""
        try:
            order_K = self._draw(self.epoch).order_K
            step, is_whole = self._shard.place(indices.numpy(), self._steps_done, order_K, self._num_ahead)
        except ConfigError:
            if self._overlaps:  # of a pass that began before the last one, perhaps in another epoch
                return self._steps_done
            raise
        if not is_whole and not self._overlaps:
            self._usage_warnings.warn_of_part(len(indices), self.batch_size)
        return step + is_whole

    def report_validation(self, accuracy: float) -> None:
        """Reports the validation accuracy of a finished epoch, the same number on every rank; `pads` follows it."""
        self._accuracies.append(float(accuracy))

    # ── one epoch ───────────────────────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        """Returns how many samples this rank takes in the present epoch; after a resume, in the rest of it. (In all of
        it if a loader that keeps its own place has resumed, because it counts from the epoch's start.)"""
        if self._num_passes == 0:
            self._usage_warnings.made.add("len")
        return self._num_mine(0 if self._is_placed else self._first_step)

    def _num_mine(self, first_step: int) -> int:
        """Returns how many samples this rank takes in the present epoch from a step on."""
        return self._shard.num_mine(len(self._draw(self.epoch).order_K), first_step)

    @property
    def num_steps(self) -> int:
        """Returns the steps of the present epoch, those already taken included; the same on every rank."""
        return self._shard.num_steps(len(self._draw(self.epoch).order_K))

    def total_steps(self, epochs: int) -> int:
        """Returns the steps of a whole run, for schedules that count steps: ``OneCycleLR(opt, lr, total_steps=…)``.

        The epochs of `unbiased` differ in length. The number is exact if the loss of every sample is reported.

        Args:
            epochs: Epochs of the run from its start, ≥ 0. Give the sampler the same number as ``epochs=``.

        Returns:
            Steps of every rank.
        """
        self._usage_warnings.made.add("total_steps")
        return sum(self._shard.num_steps(self._mode.num_drawn(epoch)) for epoch in range(epochs))

    def scores(self) -> Floats | None:
        """Returns the importance of every sample by all reports so far; None if the mode uses none."""
        self._merger.flush()
        return self._table.scores().score_N if self._mode.uses_scores else None

    def take_losses(self) -> Floats | None:
        """Returns the last loss of every sample that was reported since the last call (NaN: none), and clears them;
        None if the reports are not losses."""
        if not self._table.takes_losses:
            return None
        self._merger.flush()
        return self._table.take_losses()

    @property
    def receipt(self) -> Receipt:
        """Returns the present epoch's receipt, by which a reader can check that the draw was unbiased."""
        return self._draw(self.epoch).receipt

    @property
    def steps_done(self) -> int:
        """Returns the steps of the present epoch whose losses were reported; without a report, those whose batches the
        loop has got from its loader."""
        if self._begun and not self._is_reported:
            num_got, is_dropped = self._num_got, isinstance(self._count, LoaderCount) and self._count.is_over
            is_unmoved = num_got is None or (is_dropped and self._was_look)
            return self._steps_done if is_unmoved else min(self._first_step + (num_got or 0), self.num_steps)
        return self._steps_reported

    @property
    def _steps_reported(self) -> int:
        """Returns the steps of the present epoch whose losses were reported, those before a resume included."""
        if self._unplaced is not None:  # was on a device, which `report` does not wait for
            indices, self._unplaced = self._unplaced.cpu(), None
            self._steps_done = self._done_after(indices)
        return self._steps_done

    def order_of(self, epoch: int) -> Order:
        """Returns the read-only global order of an epoch that has begun, or of the next one if it is drawn already."""
        if epoch != self.epoch and epoch not in self._draws:
            raise ConfigError.of(
                f"an epoch that is drawn already: {sorted(self._draws)}", epoch, "ask when it has begun"
            )
        return self._draw(epoch).order_K

    def __repr__(self) -> str:
        """Returns what is drawn, for which rank, and how far training is; draws nothing by itself."""
        drawn = self._draws.get(self.epoch)
        num_steps = "" if drawn is None else f" of {self._shard.num_steps(len(drawn.order_K))}"
        options = "".join(
            f", {name}={value!r}"
            for name, value in self._settings.items()
            if name not in ("num_samples", "global_batch")
        )
        policy = "None" if self._planner is None else repr(self._planner.policy_name)
        return (
            f"ShadeSampler(num_samples={self.num_samples}, batch_size={self.batch_size}, rank={self.rank} of "
            f"{self.num_replicas}{options}, policy={policy}, epoch={self.epoch}, step={self._steps_done}{num_steps})"
        )

    def __iter__(self) -> SamplerIterator:
        return SamplerIterator(self)

    def _begin_pass(self, *, is_placed: bool) -> tuple[int, Iterator[int]]:
        """Begins a pass, when its first index is asked for.

        A pass that was set to the epoch's end leaves the epoch ended, and the pass after it is the next epoch: loaders
        that keep their place begin a new iterator after an ended one.
        """
        if self._is_placed and not is_placed and self._first_step >= self.num_steps:
            self._turn_to(self.epoch + 1)
        was_begun, is_live = self._begun, isinstance(self._count, LoaderCount) and not self._count.is_over
        self._warn_of_missing_calls()
        if self._begun and not self._was_look:
            self._first_step = 0  # the same epoch again, from its beginning
        if self._first_step == 0:
            self._at_resume = None
        elif self._at_resume is not None and self._num_live == 0:
            self._at_resume()
        if self._generators is not None and (self._follows or not self._generators.following):
            self._follows = True
            self._generators.follow(self.seed, self.epoch)
        self._begun, self._steps_done, self._unplaced = True, self._first_step, None
        self._has_ended, self._overlaps, self._is_reported = False, self._num_live > 0 or is_live, False
        self._count, self._num_dealt, self._is_first = LoaderCount.of_caller(), 0, not was_begun
        self._shard.begin()
        if self._planner is not None:
            self._planner.settle()
        draw = self._draw(self.epoch)
        self._weight_N = self._shard.weights(draw, self.num_samples)
        next_order_K = None
        if self._mode.draws_ahead and self.epoch != self._last_epoch:
            next_order_K = self._shard.epoch_order(self._draw(self.epoch + 1).order_K)
        for epoch in [e for e in self._draws if e < self.epoch]:
            del self._draws[epoch]
        order_K = self._shard.epoch_order(draw.order_K)
        if self._planner is not None:
            scores = self._scores()
            score_N = None if scores is None else scores.score_N
            start = min(self._first_step * self.global_batch, len(order_K))
            self._planner.begin_epoch(EpochPlan(self.epoch, order_K, next_order_K, score_N, start=start))
        if self._window is not None:
            self._window.begin(order_K, self._first_step)
        self._usage_warnings.warn_of_length(self.epoch, self.num_steps, self._shard.num_steps(self.num_samples))
        self._iterations += self._first_step < self.num_steps  # a resume may find that nothing is left of its epoch
        return self._num_mine(0) - self._num_mine(self._first_step), self._pass(order_K, len(draw.order_K))

    @property
    def _num_got(self) -> int | None:
        """Returns how many batches of the last pass the loop has got; None if what asks for the indices is unknown."""
        return None if self._count is None else self._count()

    @property
    def _num_ahead(self) -> int:
        """Returns the step that is handed out next, where reports can be of no other pass; else the epoch's end."""
        return self._first_step + self._num_dealt if self._is_first and not self._overlaps else self.num_steps

    @property
    def _was_look(self) -> bool:
        """Returns whether the last pass was a look at one batch, or none: no loss was reported, and the pass has not
        ended. Where workers have asked for the last index, the only batch that is left is the whole rest."""
        num_got = self._num_got
        seen = self._num_dealt if num_got is None else num_got
        is_whole = self._has_ended and self._first_step + seen >= self.num_steps
        return not self._is_reported and seen <= 1 and not is_whole

    def _count_batches(self, count: Callable[[], int]) -> None:
        """Takes the count of the batches that the loop gets in this pass, from a loader that knows it."""
        self._count = count

    def _seek(self, step: int, *, is_between: bool) -> None:
        """Sets where the next pass begins, whether or not the losses of the steps before it were reported."""
        if not is_between and step != self.num_steps:
            raise ConfigError.of(
                "a place between two batches", f"step {step}", "give loader and sampler one batch_size"
            )
        self._first_step = self._steps_done = step
        self._is_placed = True

    def _pass(self, order_K: Order, num_drawn: int) -> Iterator[int]:
        """Yields the rest of the epoch, and dispatches each batch just before it is handed out.

        The cache is planned for the pass that began last. One that began before and is still used gets the same samples
        without a plan: by position, through whatever the cache holds.
        """
        self._num_passes += 1
        number, num_steps = self._num_passes, self.num_steps
        self._num_live += 1
        try:
            for step in range(self._first_step, num_steps):
                index_G, mine = self._shard.of(order_K, num_drawn, step)
                index_B = index_G[mine]
                if number == self._num_passes:
                    if self._planner is not None:
                        index_B = self._planner.dispatch(index_G, mine, num_left=num_steps - 1 - step)
                    self._shard.remember(step, index_B)
                    self._num_dealt += 1
                    if self._window is not None:
                        num_got = self._num_dealt - ENDING_BATCHES if self._num_got is None else self._num_got
                        self._window.reach(step, self._first_step + num_got)
                yield from index_B.tolist()
        finally:
            self._num_live -= 1
        self._has_ended = True
        if self._planner is not None and number == self._num_passes:
            self._planner.end_epoch()

    def _draw(self, epoch: int) -> Draw:
        """Returns the draw of an epoch; made at most once, on every rank from the same scores."""
        if epoch not in self._draws:
            found = None if self._planner is None else self._planner.draw_of_leader(epoch)
            if found is not None:  # of the job whose stream this one takes
                self._draws[epoch] = draw_from(epoch, *found, num_samples=self.num_samples)
                return self._draws[epoch]
            draw = self._draws[epoch] = self._own_draw(epoch)
            if self._planner is not None:
                self._planner.publish_draw(epoch, draw.order_K, draw.weight_N)
        return self._draws[epoch]

    def _own_draw(self, epoch: int) -> Draw:
        scores, resident_N = self._scores(), None if self._planner is None else self._planner.resident_N

        def make() -> Draw:
            draw = self._mode.draw(epoch, scores, resident_N=resident_N, validation=Validation(tuple(self._accuracies)))
            draw = draw if self._window is None else self._window.ordered(draw)
            return draw if self.shuffle else Draw(draw.epoch, np.sort(draw.order_K), draw.weight_N, draw.receipt)

        causes = (resident_N, self._accuracies, *(() if scores is None else (scores.score_N, scores.seen_N)))
        return make() if self._shared is None else self._shared.of(epoch, causes, make)

    def _scores(self) -> Scores | None:
        self._merger.flush()
        table = self._table  # not a copy: what is made of it is made before the next report
        return Scores(table.score_N, table.seen_N) if table.seen_N.any() else None

    def _warn_of_missing_calls(self) -> None:
        """Warns of calls that the loop has not made in the epochs so far, and counts the epochs itself if need be.

        A first pass that was left without a report was a look at the data, no epoch; so is a look at one batch.
        """
        is_look = self._num_passes == 1 and not self._has_ended and "report" not in self._usage_warnings.made
        if self._iterations == 0 or is_look or (self._begun and self._was_look):
            return
        if "set_epoch" not in self._usage_warnings.made:
            self._turn_to(self.epoch + 1)
        self._usage_warnings.require("set_epoch")
        if self._mode.uses_scores:
            self._usage_warnings.require("report")
        if self._weight_N is not None and self._mode.uses_weights and "report" in self._usage_warnings.made:
            self._usage_warnings.require("weights")

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Returns all that decides the rest of the stream, as plain numbers and tensors.

        The cache is not part of it: it may be warm, cold or dead when the run resumes. Call it between steps; one rank
        may call it alone.
        """
        self._merger.flush()
        place = place_of_node(self)
        is_unknown = self._begun and not (place or self._is_reported or self._has_ended) and self._num_got is None
        if is_unknown and self._num_dealt > 1:
            self._usage_warnings.warn_of_place(self._steps_done)
        draws = [self._draws[epoch] for epoch in (self.epoch, self.epoch + 1) if epoch in self._draws]
        return {
            "settings": dict(self._settings),
            "epoch": self.epoch,
            "steps_done": self.steps_done,
            "draws": {draw.epoch: self._saved.of(draw) for draw in draws},
            "table": {
                name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in self._table.state_dict().items()
            },
            "accuracies": list(self._accuracies),
        } | place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a `state_dict`: the same global order follows, on any number of ranks with the same global
        batch.

        Args:
            state: Of a sampler with the same settings; only ``epochs`` may differ.

        Raises:
            ConfigError: The state belongs to other settings, or an order does not match its hash.
        """
        for name, mine in ({"shuffle_window": None} | self._settings).items():
            theirs = state["settings"].get(name)
            # A run may be continued for more epochs: what was drawn stays, and only later draws ask for the length.
            if theirs != mine and name == "order":
                raise ConfigError.of(
                    f"a run that draws more than {LARGE} samples as this version does, order={mine!r}",
                    f"order={theirs!r}",
                    "resume with the version of shade that saved it, or begin a new run",
                )
            if theirs != mine and name != "epochs":
                raise ConfigError.of(f"{name}={theirs!r}, as in the saved run", mine, "resume with the saved settings")
        check_place(state)
        draws = {int(epoch): load_draw(int(epoch), each, self.num_samples) for epoch, each in state["draws"].items()}
        self._draws = draws
        self._turn_to(int(state["epoch"]))
        self._first_step = self._steps_done = int(state["steps_done"])
        self._table.load_state_dict(state["table"])
        self._accuracies = list(state["accuracies"])
        self._weight_N = self._shard.weights(draws[self.epoch], self.num_samples) if self.epoch in draws else None
        if self._planner is not None:
            self._planner.doubt()

    def at_resume(self, action: Callable[[], None]) -> None:
        """Calls an action when the rest of an interrupted epoch begins, once; not if another epoch begins instead.

        Args:
            action: Called after the loader has drawn its workers' seed, and before it reads the first sample.
        """
        self._at_resume = action

    def close(self) -> None:
        """Ends the merging thread, and leaves the cache to other jobs. Safe to call twice."""
        self._merger.close()
        self._shared = None
        if self._planner is not None:
            self._planner.close()
        self._group.close()

"""ShadeSampler: takes DistributedSampler's place in the script, and plans the cache.

It draws the global order of each epoch from the importance of the samples, hands every rank its part of every global
batch, and plans the cache's residents by an order that it knows one epoch ahead: when epoch e begins, modes that draw
ahead draw e+1 from the scores of that moment (decision 0004).

Three calls of the loop carry the method: `set_epoch`, `report` and `weights`. The sampler warns once of each that is
missing when the second epoch begins (`UsageWarnings`).

Invariant: the global order depends on seed, epoch, reported losses and global batch alone. Ranks, workers and the state
of the cache change which process fetches a sample and from where, never which sample comes when.

Legend: N data set · K drawn in an epoch · B batch of one rank · G global batch = B·W · W ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler

from shade.cache.cache import SampleCache
from shade.data._sampler.cache_planner import CachePlanner
from shade.data._sampler.epoch_draws import EpochDraws, chosen_mode
from shade.data._sampler.epoch_passes import EpochPasses
from shade.data._sampler.place import Place, SamplerIterator, check_place
from shade.data._sampler.rank_shard import RankShard
from shade.data._sampler.saved_draws import SharedDraws
from shade.data._sampler.settings import check_ranks, check_settings, settings_of
from shade.data._sampler.shuffle_window import ShuffleWindow
from shade.data._sampler.usage import ForgottenCallWarning as ForgottenCallWarning
from shade.data._sampler.usage import UsageWarnings, check_wrapping
from shade.data._source.host_copy import host_copy
from shade.errors import ConfigError, refused_as
from shade.importance import ImportanceTable, ScoreMerger
from shade.rank_group import RankGroup, SingleProcessGroup, check_alike, current_group, ranks_of
from shade.sampling.base import Receipt, is_large
from shade.types import ClosedByWith, Floats, ModeName, Order

_READ_AHEAD = 1 << 20
"""Reader number of the prefetch thread; workers count from 0."""


# By class a DistributedSampler, so frameworks that give every loader one (Lightning) keep it, and set its epoch.
class ShadeSampler(DistributedSampler[int], ClosedByWith):
    """Yields this rank's sample indices of one epoch.

    It takes the arguments of `torch.utils.data.DistributedSampler`, and its own by keyword. With a `ShadeDataset` it
    plans the data set's cache; with any other data set it only samples.

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
        mode: ModeName = "unbiased",
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
        self.global_batch = batch_size * self.num_replicas
        check_wrapping(dataset)
        made, options = chosen_mode(
            mode,
            self.num_samples,
            self.global_batch,
            seed,
            {"keep": keep, "replication_factor": replication_factor},
            {"epochs": epochs, "targets_N": getattr(getattr(dataset, "source", None), "target_N", None)},
        )
        check_ranks(
            self.num_samples, batch_size, self.num_replicas, distributed=distributed, uses_scores=made.uses_scores
        )
        self._settings = settings_of(
            options,
            mode=mode,
            seed=seed,
            num_samples=self.num_samples,
            global_batch=self.global_batch,
            shuffle=shuffle,
            drop_last=drop_last,
            shuffle_window=shuffle_window,
            revision=getattr(getattr(dataset, "source", dataset), "revision", None),
        )
        cache: SampleCache | None = getattr(dataset, "cache", None)
        joined = distributed and self.num_replicas > 1
        self._group: RankGroup = current_group("the sampler's plans") if joined else SingleProcessGroup()
        """For the training thread; the merger's thread has its own."""
        own = {"batch_size": batch_size, "epochs": epochs, "score": score, "follow": follow, "cache": cache is not None}
        check_alike(self._group, own | self._settings)
        if not (cache is not None or shuffle_window is not None or is_large(self.num_samples)):
            self._group.close()
            self._group = SingleProcessGroup()
        self._merger = ScoreMerger(ImportanceTable(self.num_samples, score, made.default_score), batch_size)
        self._planner: CachePlanner | None = None
        if cache is not None:
            cache.enter_rank(dataset.source.payload_bytes_N)
            self._planner = CachePlanner(
                cache,
                getattr(dataset, "policy", None) or made.default_policy,
                made.draws_ahead,
                self.rank,
                self.num_replicas,
                self._group,
                global_batch=self.global_batch,
                follow=follow,
            )
            # A cell that binds its names anew closes nothing.
            weakref.finalize(self, self._planner.leave).atexit = False
        elif follow is not None:
            raise ConfigError.of(
                "a ShadeDataset with a cache, to follow one stream", type(dataset).__name__, "give it one"
            )
        window: ShuffleWindow | None = None
        if shuffle_window is not None:
            if not shuffle:
                raise ConfigError.of("shuffle=True with a shuffle_window", False, "leave one of the two out")
            count = None if cache is None else cache.for_thread(_READ_AHEAD).count_origin
            window = ShuffleWindow(dataset, shuffle_window, seed, self.global_batch, group=self._group, count=count)
        self._draws = EpochDraws(
            made,
            self._merger,
            shuffle=shuffle,
            epochs=epochs,
            planner=self._planner,
            window=window,
            shared=SharedDraws(self.num_samples, self._group) if joined and is_large(self.num_samples) else None,
        )
        self._usage = UsageWarnings(dataset)
        self.place = Place(self._usage, batch_size)
        """Where training is in the stream; read by loaders, moved by the calls below."""
        self._passes = EpochPasses(
            self.place,
            self._draws,
            RankShard(self.rank, self.num_replicas, batch_size, drop_last),
            self._usage,
            planner=self._planner,
            window=window,
            generators=getattr(dataset, "generators", None),
            seed=seed,
        )

    # ── the calls of a training loop ────────────────────────────────────────────────────────────────────────────────

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch, as with DistributedSampler. After `load_state_dict` the interrupted epoch resumes where
        it stopped; any other starts from its beginning."""
        self._usage.made.add("set_epoch")
        self.place.say(epoch)

    @property
    def epoch(self) -> int:
        """The present epoch, or the one that begins next; may be set, as DistributedSampler's."""
        return self.place.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

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
        self._usage.made.add("weights")
        return self._passes.weights(indices)

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
        self._usage.made.add("report")
        if not isinstance(indices, torch.Tensor):
            # The merger refuses it.
            return self._merger.report(indices, losses)
        self._usage.check_numbering()
        indices = host_copy(indices)
        located = self.place.locate(indices)
        self._merger.report(indices, losses)
        self.place.reported(located)

    def count_step(self) -> None:
        """Says that a step of training is done, in a loop that does not report; a `Checkpointer` does."""
        self.place.count_step()

    def report_validation(self, accuracy: float) -> None:
        """Reports the validation accuracy of a finished epoch, the same number on every rank; `pads` follows it."""
        self._draws.report_validation(accuracy)

    # ── one epoch ───────────────────────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        """Returns how many samples this rank takes in the present epoch; after a resume, in the rest of it."""
        if not self.place.has_pass:
            self._usage.made.add("len")
        # A loader that keeps its own place counts from the epoch's start, also when it has resumed.
        return self._passes.num_mine(0 if self.place.is_sought else self.place.first_step)

    @property
    def num_steps(self) -> int:
        """Returns the steps of the present epoch, those already taken included; the same on every rank."""
        return self._passes.num_steps

    def total_steps(self, epochs: int) -> int:
        """Returns the steps of a whole run, for schedules that count steps: ``OneCycleLR(opt, lr, total_steps=…)``.

        The epochs of `unbiased` differ in length. The number is exact if the loss of every sample is reported.

        Args:
            epochs: Epochs of the run from its start, ≥ 0. Give the sampler the same number as ``epochs=``.

        Returns:
            Steps of every rank.
        """
        self._usage.made.add("total_steps")
        return sum(self._passes.shard.num_steps(self._draws.mode.num_drawn(epoch)) for epoch in range(epochs))

    def scores(self) -> Floats | None:
        """Returns the importance of every sample by all reports so far; None if the mode uses none."""
        self._merger.flush()
        return self._draws.table.scores().score_N if self._draws.mode.uses_scores else None

    def take_losses(self) -> Floats | None:
        """Returns the last loss of every sample that was reported since the last call (NaN: none), and clears them;
        None if the reports are not losses."""
        return self._draws.take_losses()

    @property
    def receipt(self) -> Receipt:
        """Returns the present epoch's receipt, by which a reader can check that the draw was unbiased."""
        return self._draws.of(self.place.epoch).receipt

    @property
    def steps_done(self) -> int:
        """Returns the steps of the present epoch whose losses were reported; without a report, those whose batches the
        loop has got from its loader."""
        return self.place.steps_done

    def order_of(self, epoch: int) -> Order:
        """Returns the read-only global order of an epoch that has begun, or of the next one if it is drawn already."""
        if epoch != self.place.epoch and self._draws.made(epoch) is None:
            raise ConfigError.of(
                f"an epoch that is drawn already: {self._draws.epochs_made}", epoch, "ask when it has begun"
            )
        return self._draws.of(epoch).order_K

    def __repr__(self) -> str:
        """Returns what is drawn, for which rank, and how far training is; draws nothing by itself."""
        drawn = self._draws.made(self.place.epoch)
        num_steps = "" if drawn is None else f" of {self.num_steps}"
        options = "".join(
            f", {name}={value!r}"
            for name, value in self._settings.items()
            if name not in ("num_samples", "global_batch")
        )
        policy = "None" if self._planner is None else repr(self._planner.policy_name)
        return (
            f"ShadeSampler(num_samples={self.num_samples}, batch_size={self.batch_size}, rank={self.rank} of "
            f"{self.num_replicas}{options}, policy={policy}, epoch={self.epoch}, "
            f"step={self.place.steps_shown}{num_steps})"
        )

    def __iter__(self) -> SamplerIterator:
        return SamplerIterator(self, self._begin_pass)

    def _begin_pass(self, is_placed: bool) -> tuple[int, Iterator[int]]:
        """Begins a pass for a `SamplerIterator`, as that describes it."""
        return self._passes.begin(is_placed)

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Returns all that decides the rest of the stream, as plain numbers and tensors.

        The cache is not part of it: it may be warm, cold or dead when the run resumes. Call it between steps; one rank
        may call it alone.
        """
        place = self.place.state_dict()
        epoch = self.place.epoch
        return {"settings": dict(self._settings), "epoch": epoch} | place | self._draws.state_dict(epoch)

    @refused_as(ConfigError, "what ShadeSampler.state_dict() returned", "pass that")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a `state_dict`: the same global order follows, on any number of ranks with the same global
        batch.

        Args:
            state: Of a sampler with the same settings; only ``epochs`` may differ.

        Raises:
            ConfigError: The state belongs to other settings, or an order does not match its hash.
        """
        check_settings(state["settings"], self._settings)
        check_place(state)
        self._draws.load_state_dict(state)
        self.place.turn_to(int(state["epoch"]), int(state["steps_done"]))
        self._passes.resume()

    def at_resume(self, action: Callable[[], None]) -> None:
        """Calls an action when the rest of an interrupted epoch begins, once; not if another epoch begins instead.

        Args:
            action: Called after the loader has drawn its workers' seed, and before it reads the first sample.
        """
        self.place.at_resume(action)

    def close(self) -> None:
        """Ends the merging thread, and leaves the cache to other jobs. Safe to call twice."""
        self._merger.close()
        self._draws.close()
        if self._planner is not None:
            self._planner.close()
        self._group.close()

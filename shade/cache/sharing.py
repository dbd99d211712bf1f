"""Sharing: one rank's part in a cache that several jobs use at the same time.

A thread keeps the job's record (rank 0 writes it, the others read) and learns from the other jobs' records which slots
to read, how much this job may keep, and when they will want what. While another job lives, the exact plan rests, and
each rank decides for itself with `shade.policy.streams`: a sample stays that any job uses soon. What a rank holds is
then known from what its own workers wrote and removed (`ResidencyMap.held_N`).

Each rank looks after the entries that it brought in, within its equal part of the job's quota. When the other jobs have
gone, their entries are taken over, and the next epoch is planned exactly again. Decision 0024.

Legend: B batch of one rank · G global batch · N data set · R held by this rank · W ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from shade.cache.cache import SampleCache
from shade.cache.job_registry import BEAT_SECONDS, JobRecord, JobRegistry, SharedCacheView
from shade.errors import ConfigError, StoreError
from shade.policy.base import EpochPlan
from shade.policy.streams import NEVER, Seconds, Stream, latest_used, seconds_to_next_use
from shade.types import Bools, Bytes, Clock, Indices

logger = logging.getLogger("shade.cache")

_SMOOTHING: Final = 0.1
"""Weight of the newest measurement of a job's speed: it averages over two to three seconds of beats."""
_SLOWEST: Final = 1e-3
"""Speed, in samples a second, assumed of a job that stands still: its next uses are far away, not unknown."""
_LONGEST_PAUSE_SECONDS: Final = 4.0
"""Longest pause between two looks at a store that does not answer; less than half a lease."""
_LEAVE_SECONDS: Final = 1.0
_SWEEP_SAMPLES: Final = 4096
"""Most residents that a sweep looks at for each batch: a fraction of a millisecond."""


class Sharing:
    """Knows the other jobs, and decides for one rank which samples stay. On rank 0 the registry's job has joined."""

    def __init__(
        self,
        cache: SampleCache,
        registry: JobRegistry,
        rank: int,
        world_size: int,
        clock: Clock = time.monotonic,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._cache, self._registry, self._rank, self._world_size, self._clock = (
            cache,
            registry,
            rank,
            world_size,
            clock,
        )
        self._num_samples = len(cache.residency.flag_N)
        self._lock = threading.Lock()
        self._orders: dict[int, Indices] = {}
        self._own = Stream(self._num_samples)
        self._streams: dict[str, Stream] = {}
        self._paces: dict[str, tuple[float, int, int, float | None]] = {}
        self._inherited: list[int] = []
        self._epoch = self._cursor = self._start = self._fetched_before = 0
        self._horizon_seconds = NEVER
        self._batches_to_sweep = 0
        self._coming: deque[tuple[int, Indices]] = deque()
        self.view = SharedCacheView({}, {})
        """What the last look found."""
        self._beat_seconds = beat_seconds
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="shade-jobs", daemon=True)

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Looks once, and from then on every beat. Raises ConfigError if there are too many jobs already."""
        with contextlib.suppress(StoreError):
            self.look()
        self._thread.start()

    def _keep(self) -> None:
        pause_seconds, pause = self._beat_seconds, self._wake
        while True:
            pause.wait(pause_seconds)
            self._wake.clear()
            if self._stop.is_set():  # asked after `clear`: `leave` sets this one first
                return self._say_left()
            if self._look():
                pause_seconds, pause = self._beat_seconds, self._wake
            else:
                pause_seconds, pause = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS), self._stop

    def hurry(self) -> None:
        """Makes the next look come at once, unless the store does not answer."""
        self._wake.set()

    def _look(self) -> bool:
        try:
            self.look()
        except (StoreError, ConfigError, ValueError) as error:
            logger.debug("who else uses the cache is not known: %s", error)
            return False
        return True

    def look(self) -> None:
        """Does one beat: publishes how far this job is, and reads the other jobs' records.

        Raises StoreError if the store does not answer, and ConfigError if this job lost its slot and there is no other.
        """
        registry = self._registry
        if self._rank == 0:
            epochs = self._publish()
            registry.record = replace(
                registry.record, epoch=self._epoch, num_fetched=self.num_fetched, order_epochs=epochs
            )
            view = registry.beat()
            if self._settle_quota(view):
                self._settle_claim(registry.beat())
                view = registry.beat()  # the other ranks read there what was taken: nothing, until then
            self._cache.quota_bytes = registry.record.quota_bytes
        else:
            view = registry.look()
        mine = view.slots_of(registry.owner)
        if not mine:
            return
        if self._rank > 0:
            self._cache.quota_bytes = view.living[mine[0]].quota_bytes
        self._inherit(mine)
        self._learn(view.others(registry.owner))
        theirs = [slot for slot in (*view.living, *view.left) if slot not in mine]
        self._cache.use_slots(mine, sorted(theirs))
        self.view = view

    def _publish(self) -> tuple[int, ...]:
        """Publishes the orders of this epoch and the next; returns the epochs that are published."""
        if not self.has_company and not self._registry.record.group:
            return ()
        mine = self.view.slots_of(self._registry.owner)
        if not mine:
            return ()
        with self._lock:
            orders = dict(self._orders)
        there = self._registry.record.order_epochs
        new = {
            self._registry.order_key(mine[0], epoch): _packed(orders[epoch]) for epoch in orders if epoch not in there
        }
        if new:
            self._cache.store.set_many(new)
            over = [epoch for epoch in there if epoch not in orders]
            self._cache.store.delete_many([key for epoch in over for key in self._registry.epoch_keys(mine[0], epoch)])
        return tuple(sorted(orders))

    def _settle_quota(self, view: SharedCacheView) -> bool:
        """Finds this job's share. A smaller one counts at once; returns True if there is a larger one to be claimed."""
        registry, cache = self._registry, self._cache
        share, quota = self._share(view), registry.record.quota_bytes
        if share <= quota:
            kept = cache.admission.counted_bytes() if share < registry.record.claim_bytes else 0
            registry.record = replace(registry.record, quota_bytes=share, claim_bytes=max(share, kept))
            return False
        target = min(share, cache.capacity_bytes - self._claimed(view))
        if target <= quota:
            return False
        registry.record = replace(registry.record, claim_bytes=max(target, registry.record.claim_bytes))
        return True

    def _settle_claim(self, view: SharedCacheView) -> None:
        """Takes as much of the claim as fits beside the claims of others; the rest is claimed again later."""
        registry, cache = self._registry, self._cache
        target = min(self._share(view), cache.capacity_bytes - self._claimed(view))
        quota = max(target, registry.record.quota_bytes)
        registry.record = replace(
            registry.record, quota_bytes=quota, claim_bytes=max(quota, min(target, registry.record.claim_bytes))
        )

    def _share(self, view: SharedCacheView) -> int:
        """Returns what this job may keep: an equal part. A group that takes one stream counts once, and its leader
        keeps all."""
        registry = self._registry
        groups = {record.group or record.owner for record in view.living.values()}
        if view.leader_of(registry.record.group, registry.owner) is not None:
            return 0
        return self._cache.capacity_bytes // len(groups)

    def _claimed(self, view: SharedCacheView) -> int:
        """Returns what other jobs have or still hold."""
        return sum(record.claim_bytes for record in (*view.others(self._registry.owner).values(), *view.left.values()))

    def _inherit(self, mine: list[int]) -> None:
        """Counts the entries in slots that this job has taken over, and forgets those that it has lost."""
        self._inherited = [slot for slot in self._inherited if slot in mine[1:]]
        for slot in mine[1:] if self._rank == 0 else []:
            if slot not in self._inherited:
                self._cache.inherit(slot)
                self._inherited.append(slot)

    def release(self, empty_slots: list[int]) -> None:
        """Gives back slots that were taken over and in which nothing is left. Raises StoreError if the store fails."""
        for slot in [slot for slot in empty_slots if slot in self._inherited]:
            self._registry.release(slot)
            self._inherited.remove(slot)

    def _learn(self, others: Mapping[int, JobRecord]) -> None:
        """Reads the orders of other jobs, their positions in them, and their speeds."""
        living = {record.owner for record in others.values()}
        for slot, record in others.items():
            stream = self._streams.get(record.owner) or Stream(self._num_samples)
            wanted = [epoch for epoch in record.order_epochs if epoch >= record.epoch and epoch not in stream.epochs]
            for epoch, order in zip(wanted, self._fetch_orders(slot, wanted), strict=True):
                if order is not None:
                    with self._lock:
                        stream.learn(epoch, order)
            with self._lock:
                stream.move(record.epoch, record.num_fetched)
                stream.rate = self._pace(record.owner, record.epoch, record.num_fetched) or self._own.rate
                self._streams[record.owner] = stream
        with self._lock:
            for owner in [owner for owner in self._streams if owner not in living]:
                del self._streams[owner]
            self._own.rate = self._pace("", self._epoch, self.num_fetched) or self._own.rate

    def _fetch_orders(self, slot: int, epochs: list[int]) -> list[Indices | None]:
        contents = (
            self._cache.store.get_many([self._registry.order_key(slot, epoch) for epoch in epochs]) if epochs else []
        )
        return [None if content is None else unpacked_order(content, self._num_samples) for content in contents]

    def _pace(self, owner: str, epoch: int, done: int) -> float | None:
        """Returns samples a second, smoothed over some seconds; None until it has moved. An epoch's end does not change
        it."""
        now = self._clock()
        since, before_epoch, before, rate = self._paces.get(owner, (now, epoch, done, None))
        if now > since and epoch == before_epoch and (done > before or rate is not None):
            measured = max((done - before) / (now - since), _SLOWEST)
            rate = measured if rate is None else rate + _SMOOTHING * (measured - rate)
        self._paces[owner] = (now, epoch, done, rate)
        return rate

    # ── the training process ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_company(self) -> bool:
        """Returns whether another job lives, or has left a slot that no job has taken over yet."""
        return bool(self.view.left or self.view.others(self._registry.owner))

    @property
    def num_fetched(self) -> int:
        """Returns how many samples of the present epoch all ranks have fetched, as far as this one can know."""
        mine = self._cache.residency.totals()["samples"] - self._fetched_before
        return min(self._cursor, self._start + mine * self._world_size)

    def begin_epoch(self, plan: EpochPlan) -> None:
        """Takes in what this job uses next."""
        with self._lock:
            self._orders = {plan.epoch: plan.order_K}
            if plan.next_order_K is not None:
                self._orders[plan.epoch + 1] = plan.next_order_K
            for number, order in self._orders.items():
                if number not in self._own.epochs:
                    self._own.learn(number, order)
            self._own.move(plan.epoch, plan.start)
            self._epoch, self._cursor, self._start = plan.epoch, plan.start, plan.start
            self._coming.clear()
            self._fetched_before = self._cache.residency.totals()["samples"]

    def enter(self, held_N: Bools) -> None:
        """Lets the exact plan rest from now on. ``held_N`` is what it holds resident, the same on every rank; each rank
        looks after its part of it."""
        residency = self._cache.residency
        residency.held_N[:] = held_N & (np.arange(self._num_samples) % self._world_size == self._rank)
        self._horizon_seconds, self._batches_to_sweep = NEVER, 0
        residency.is_shared = True

    def dispatch(self, index_B: Indices, num_global: int, near_B: Bools | None, *, ending: bool) -> None:
        """Decides which samples of this rank's part of a batch stay, just before it is fetched.

        ``num_global`` is the size of the global batch; ``near_B`` and ``ending`` are as for `ResidencyMap.post`.
        """
        with self._lock:
            self._cursor += num_global
            self._own.move(self._epoch, self._cursor)
            wait_B = self._wait(index_B)
            if self._batches_to_sweep <= 0:
                stay_B = self._sweep(index_B, wait_B)
            else:
                stay_B = wait_B < self._horizon_seconds if self._horizon_seconds < NEVER else np.full(len(wait_B), True)
            self._batches_to_sweep -= 1
            self._coming.append((self._cursor, index_B[stay_B]))
        self._cache.residency.post(index_B, np.ones(len(index_B), dtype=bool), stay_B, near_B, ending=ending)

    def place_after(self, num_global: int) -> tuple[int, int, int]:
        """Returns where this job is after the next batch: the epoch, the position in it, and the epoch's length."""
        return self._epoch, self._cursor + num_global, len(self._orders[self._epoch])

    def advance(self, num_global: int) -> None:
        """Counts a global batch that the exact plan has dispatched."""
        self._cursor += num_global

    def _wait(self, index_B: Indices) -> Seconds:
        return seconds_to_next_use(index_B, (self._own, *self._streams.values()))

    def _sweep(self, index_B: Indices, wait_B: Seconds) -> Bools:
        """Frees space for a batch: of what is held and what it would bring in, the samples used last leave. Returns
        (B,) which of the batch stay.

        If so much is held that a look at all of it for every batch would take too long, the sweep frees space for the
        batches until the next sweep as well, and its horizon (the wait at which a sample leaves) is in force until
        then.
        """
        cache = self._cache
        held = np.setdiff1d(np.flatnonzero(cache.residency.held_N), index_B, assume_unique=True)
        self._batches_to_sweep = 1 + len(held) // _SWEEP_SAMPLES
        unseen = (self._batches_to_sweep - 1) * len(index_B) * int(cache.size_bytes_N.mean()) // 2
        quota = cache.residency.capacity_bytes // self._world_size - unseen - self._coming_bytes()
        candidates = np.concatenate([held, index_B])
        wait = np.concatenate([self._wait(held), wait_B])
        size = cache.size_bytes_N[candidates]
        leaves = latest_used(wait, size, int(size.sum()) - quota)
        self._horizon_seconds = float(wait[leaves].min()) if leaves.any() else NEVER
        going = candidates[: len(held)][leaves[: len(held)]]
        if len(going):
            cache.remove(going)
        return ~leaves[len(held) :]

    def _coming_bytes(self) -> int:
        """Returns what batches that are not fetched yet may still bring in."""
        while self._coming and self._coming[0][0] <= self.num_fetched:
            self._coming.popleft()
        coming = [index for _, index_B in self._coming for index in index_B.tolist()]
        held_N = self._cache.residency.held_N
        return sum(int(self._cache.size_bytes_N[index]) for index in coming if not held_N[index])

    def leave(self) -> None:
        """Lets the thread end, which says that this job has left; waits for a second at most. Does nothing in a
        child."""
        # A child's copy of the event may be locked by a thread that it does not have.
        if self._registry.record.process_id != os.getpid():
            return
        self._stop.set()
        self._wake.set()
        # The garbage collector may run in any thread.
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_LEAVE_SECONDS)

    def close(self) -> None:
        """Ends the thread, which says that this job has left. Safe to call twice, and in a child."""
        is_first = not self._stop.is_set()
        self.leave()
        if self._thread.ident is not None:
            self._thread.join()
        elif is_first:  # `start` was never called, as by a test that moves the clock itself
            self._say_left()

    def _say_left(self) -> None:
        if self._rank == 0 and self._registry.record.process_id == os.getpid():
            try:
                self._registry.leave()
            except StoreError as error:
                logger.debug("this job's record stays behind, and ends with its lease: %s", error)


def _packed(order_K: Indices) -> bytes:
    """Returns an order as 32-bit numbers."""
    return order_K.astype("<u4").tobytes()


def unpacked_order(content: Bytes, num_samples: int) -> Indices | None:
    """Returns an order of so many samples at most, or None for bytes that are none."""
    if len(content) % 4:
        return None
    order_K = np.frombuffer(content, dtype="<u4").astype(np.int64)
    return order_K if order_K.max(initial=0) < max(1, num_samples) else None

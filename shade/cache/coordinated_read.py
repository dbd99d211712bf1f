"""Coordinated reading: several jobs take one stream of samples in step, and only one of them reads the origin.

Jobs that name the same group have one stream: the draws of their leader, the living member in the lowest slot. The
leader is ahead of the others by a window that the cache can hold; what it brings in stays until the last follower has
used it. A follower waits until the leader has fetched a batch, and the leader waits for the slowest follower: all run
at the pace of the slowest. Gradients stay unbiased: the weights that come with a draw belong to its probabilities.

Invariant: no job waits for a job that is dead.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from shade.cache.cache import SampleCache
from shade.cache.job_registry import JobRecord, JobRegistry, SharedCacheView
from shade.cache.sharing import Sharing, unpacked_order
from shade.errors import StoreError
from shade.types import Floats, Order

BEAT_SECONDS: Final = 0.05
"""Interval at which followers look for the leader's progress."""
_MARGIN_BATCHES: Final = 2
"""Batches of margin, because workers finish out of order."""
_LEAST_WINDOW_BATCHES: Final = 6
"""Smallest window. With three batches or less all jobs would wait for each other; with four, a batch would take as
long as news of it."""
_WINDOW_SHARE: Final = 0.25
"""Largest share of the cache for what the slowest follower has still to use."""
_POLL_SECONDS: Final = 0.01


class CoordinatedRead:
    """One job's part in a group."""

    def __init__(self, cache: SampleCache, registry: JobRegistry, sharing: Sharing, global_batch: int) -> None:
        self._cache, self._registry, self._sharing, self._global_batch = cache, registry, sharing, global_batch
        kept = int(_WINDOW_SHARE * cache.capacity_bytes / max(1.0, float(cache.size_bytes_N.mean())))
        self._window = max(_LEAST_WINDOW_BATCHES * global_batch, kept)

    def leader(self, view: SharedCacheView | None = None) -> JobRecord | None:
        """Returns the record of the job whose stream this one takes; None if it is its own."""
        return (view or self._sharing.view).leader_of(self._registry.record.group, self._registry.owner)

    def draw_of(self, epoch: int) -> tuple[Order, Floats | None] | None:
        """Returns the leader's order of an epoch and the weight of every sample (None: all 1); waits until it is drawn.

        Returns None if this job draws for itself: it leads, or the leader is past that epoch or cannot be asked.
        """
        while True:
            leader = self.leader()
            if leader is None or leader.epoch > epoch:
                return None
            try:
                (content,) = self._cache.store.get_many([self._registry.draw_key(leader.home, epoch)])
            except StoreError:
                return None
            if content is not None:
                return _unpacked(content, len(self._cache.size_bytes_N))
            time.sleep(_POLL_SECONDS)

    def publish(self, epoch: int, order_K: Order, weight_N: Floats | None) -> None:
        """Publishes a draw for the followers; if the store does not take it, they draw for themselves."""
        home = self._registry.record.home
        try:
            self._cache.store.set_many({self._registry.draw_key(home, epoch): _packed(order_K, weight_N)})
        except StoreError:
            return

    def wait(self, epoch: int, position: int, num_total: int) -> None:
        """Returns when this job may ask for the samples up to a position of the epoch, which has ``num_total``."""
        while not self._may_go(epoch, position, num_total):
            self._sharing.hurry()
            time.sleep(_POLL_SECONDS)

    def _may_go(self, epoch: int, position: int, num_total: int) -> bool:
        view = self._sharing.view
        leader = self.leader(view)
        if leader is not None:
            needed = min(position + _MARGIN_BATCHES * self._global_batch, num_total)
            return leader.epoch > epoch or (leader.epoch == epoch and leader.num_fetched >= needed)
        group = self._registry.record.group
        members = [record for record in view.others(self._registry.owner).values() if record.group == group]
        # An epoch in between counts as long as this one.
        behind = ((epoch - each.epoch) * num_total + position - each.num_fetched for each in members)
        return all(num_samples <= self._window for num_samples in behind)


def _packed(order_K: Order, weight_N: Floats | None) -> bytes:
    """Returns the order's length, the order, and the weights if there are any, as bytes."""
    head = np.array([len(order_K)], dtype="<u4").tobytes() + order_K.astype("<u4").tobytes()
    return head if weight_N is None else head + weight_N.astype("<f4").tobytes()


def _unpacked(content: bytes, num_samples: int) -> tuple[Order, Floats | None] | None:
    """Returns what was packed for a data set of so many samples, or None for other bytes."""
    stop = 4 + 4 * int.from_bytes(content[:4], "little")
    rest = content[stop:]
    order_K = unpacked_order(content[4:stop], num_samples) if stop <= len(content) else None
    if order_K is None or len(rest) not in (0, 4 * num_samples):
        return None
    return order_K.astype(np.int32), np.frombuffer(rest, dtype="<f4").astype(np.float32) if rest else None

"""Follow: several jobs walk one stream of samples in step, and only one of them reads the origin.

A search for hyper-parameters trains many models on the same data. If they take the same samples in the same order at
about the same time, each sample needs to be read once for all of them, whatever the cache holds. So jobs that name the
same group have one stream: the draws of their leader, which is the living member in the lowest slot. It is ahead of the
others, by a window that the cache can hold; what it brings in stays until the last of them has used it, because that is
when each of them wants it next (`shade.policy.streams`). They are one job in the division of the cache, and the leader
keeps for all of them.

Every follower waits until the leader has fetched a batch before it asks for it, and the leader waits for the slowest,
so all go at the pace of the slowest: that is what "in step" costs. A follower that dies or leaves is not waited for,
and when the leader does, the next in line leads, with the draws that it has and then with its own. Gradients stay
unbiased: the weights that come with a draw belong to its probabilities, whoever's losses these were made from.

Invariant: nobody waits for a job that does not live.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from shade.cache.cache import SampleCache
from shade.cache.job_registry import JobRecord, JobRegistry, SharedCacheView
from shade.cache.sharing import Sharing
from shade.errors import StoreError
from shade.types import Floats, Indices

BEAT_SECONDS: Final = 0.05
"""Followers go on as they learn that the leader has."""
_MARGIN_BATCHES: Final = 2
"""Workers finish out of order."""
_LEAST_WINDOW_BATCHES: Final = 16
_WINDOW_SHARE: Final = 0.25
"""Of the cache, at most, for what the slowest has still to use."""
_POLL_SECONDS: Final = 0.01


class CoordinatedRead:
    """One job's part in a group.

    Args:
        cache: The data set's.
        jobs: This job's place.
        sharing: Keeps the view of all jobs fresh.
        global_batch: G.
    """

    def __init__(self, cache: SampleCache, jobs: JobRegistry, sharing: Sharing, global_batch: int) -> None:
        self._cache, self._jobs, self._sharing, self._global_batch = cache, jobs, sharing, global_batch
        kept = int(_WINDOW_SHARE * cache.capacity_bytes / max(1.0, float(cache.size_bytes_N.mean())))
        self._window = max(_LEAST_WINDOW_BATCHES * global_batch, kept)

    def leader(self, view: SharedCacheView | None = None) -> JobRecord | None:
        """The note of the job whose stream this one walks; None where it is its own."""
        return (view or self._sharing.view).leader_of(self._jobs.record.group, self._jobs.owner)

    def draw_of(self, epoch: int) -> tuple[Indices, Floats | None] | None:
        """The leader's draw; waits until it has made it.

        Args:
            epoch: Of which.

        Returns:
            The order and the weight of every sample (None: all 1); None where this job has to draw for itself, because
            it leads, or the leader is past that epoch or cannot be asked.
        """
        while True:
            leader = self.leader()
            if leader is None or leader.epoch > epoch:
                return None
            try:
                (content,) = self._cache.store.get_many([self._jobs.draw_key(leader.home, epoch)])
            except StoreError:
                return None
            if content is not None:
                return _unpacked(content)
            time.sleep(_POLL_SECONDS)

    def publish(self, epoch: int, order_K: Indices, weight_N: Floats | None) -> None:
        """Lays out a draw for those who follow; one that the store does not take is one that they make themselves.

        Args:
            epoch: Of which.
            order_K: Its order.
            weight_N: The weight of every sample; None: all 1.
        """
        home = self._jobs.record.home
        try:
            self._cache.store.set_many({self._jobs.draw_key(home, epoch): _packed(order_K, weight_N)})
        except StoreError:
            return

    def wait(self, epoch: int, position: int, num_total: int) -> None:
        """Returns when it is this job's turn to ask for the samples up to a position of the epoch.

        Args:
            epoch: Its number.
            position: Where the batch ends that would be asked for.
            num_total: Samples of the epoch.
        """
        while not self._may_go(epoch, position, num_total):
            time.sleep(_POLL_SECONDS)

    def _may_go(self, epoch: int, position: int, num_total: int) -> bool:
        view = self._sharing.view
        leader = self.leader(view)
        if leader is not None:
            needed = min(position + _MARGIN_BATCHES * self._global_batch, num_total)
            return leader.epoch > epoch or (leader.epoch == epoch and leader.num_fetched >= needed)
        group = self._jobs.record.group
        members = [record for record in view.others(self._jobs.owner).values() if record.group == group]
        return all(self._lag(record, epoch, position, num_total) <= self._window for record in members)

    def _lag(self, record: JobRecord, epoch: int, position: int, num_total: int) -> int:
        """How many samples a follower is behind; an epoch that lies between counts as long as this one."""
        return (epoch - record.epoch) * num_total + position - record.num_fetched


def _packed(order_K: Indices, weight_N: Floats | None) -> bytes:
    """Length of the order, the order, and the weights where there are any."""
    head = np.array([len(order_K)], dtype="<u4").tobytes() + order_K.astype("<u4").tobytes()
    return head if weight_N is None else head + weight_N.astype("<f4").tobytes()


def _unpacked(content: bytes) -> tuple[Indices, Floats | None]:
    (length,) = np.frombuffer(content[:4], dtype="<u4")
    order_K = np.frombuffer(content, dtype="<u4", count=int(length), offset=4).astype(np.int64)
    rest = content[4 + 4 * int(length) :]
    return order_K, np.frombuffer(rest, dtype="<f4").astype(np.float32) if rest else None

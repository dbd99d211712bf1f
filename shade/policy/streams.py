"""Predicts when any of the jobs that share a cache uses each sample next, and chooses who leaves when space is wanted.

One job alone plans an epoch ahead, exactly (`plan`). Several jobs walk orders of their own, each at its own pace. Here
they share one clock: a job at position c of its epoch, at r samples a second, uses what comes k positions later in
k / r seconds. The next use of a sample is the earliest of all jobs', and Belady's rule applies to the merged future.
No order is changed for it. Decision 0024 says what it is worth. Four bytes a sample, job and epoch.

Legend: B batch · N data set · K accesses of one epoch · R residents.

References:
    Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from shade.types import Bools, Indices, Order

Seconds = npt.NDArray[np.float64]
NEVER: float = float("inf")
"""Seconds until a use that no known order holds."""
_ABSENT = -1


class Stream:
    """What is known of one job's future: the orders of some epochs, its position in them, and its pace.

    Args:
        num_samples: N.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._position_N: dict[int, npt.NDArray[np.int32]] = {}
        self._length: dict[int, int] = {}
        self.epoch = 0
        """The present epoch."""
        self.cursor = 0
        """Samples of the present epoch that are behind."""
        self.rate = 1.0
        """Samples a second; only its ratio to the other jobs' counts."""

    @property
    def epochs(self) -> list[int]:
        """Returns the epochs whose order is known."""
        return sorted(self._position_N)

    def learn(self, epoch: int, order_K: Order) -> None:
        """Takes in the order of an epoch, from its first access to its last; of repeats the last counts."""
        position_N = np.full(self._num_samples, _ABSENT, dtype=np.int32)
        position_N[order_K] = np.arange(len(order_K), dtype=np.int32)
        self._position_N[epoch], self._length[epoch] = position_N, len(order_K)

    def move(self, epoch: int, cursor: int) -> None:
        """Sets the job's present epoch and position, and forgets epochs that are over."""
        self.epoch, self.cursor = epoch, cursor
        # An order has four bytes a sample, so it goes as soon as it is over.
        for over in [known for known in self._position_N if known < epoch]:
            del self._position_N[over], self._length[over]

    def seconds_to(self, index_B: Indices) -> Seconds:
        """Returns (B,) seconds until this job uses each sample next; `NEVER` if no known order says."""
        wait_B = np.full(len(index_B), NEVER)
        later = self._length.get(self.epoch, 0) - self.cursor
        following_N = self._position_N.get(self.epoch + 1)
        if following_N is not None and self.epoch in self._length:
            position_B = following_N[index_B]
            # The next epoch begins where this one ends, so its positions count from there.
            np.copyto(wait_B, position_B + later, where=position_B >= 0)
        present_N = self._position_N.get(self.epoch)
        if present_N is not None:
            position_B = present_N[index_B]
            # The present epoch overwrites the next one: it comes first.
            np.copyto(wait_B, position_B - self.cursor, where=position_B >= self.cursor)
        return wait_B / self.rate


def seconds_to_next_use(index_B: Indices, streams: Iterable[Stream]) -> Seconds:
    """Returns (B,) seconds until any of the jobs uses each sample next; `NEVER` if none is known."""
    wait_B = np.full(len(index_B), NEVER)
    for stream in streams:
        np.minimum(wait_B, stream.seconds_to(index_B), out=wait_B)
    return wait_B


def latest_used(wait_R: Seconds, size_bytes_R: npt.NDArray[np.int64], wanted_bytes: int) -> Bools:
    """Chooses the residents that are used last, until ``wanted_bytes`` are free: (R,) True for those that leave; all,
    if they are not enough."""
    leaves_R = np.zeros(len(wait_R), dtype=bool)
    if wanted_bytes > 0:
        by_use = np.argsort(wait_R, kind="stable")[::-1]
        freed = np.cumsum(size_bytes_R[by_use])
        leaves_R[by_use[: int(np.searchsorted(freed, wanted_bytes)) + 1]] = True
    return leaves_R

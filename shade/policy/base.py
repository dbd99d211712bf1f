"""What a cache policy is: who is admitted, who stays, who goes. Arithmetic on arrays: no store, no I/O, no torch.

A policy is the same object in the simulator and in the running cache. It walks the *global* order of an epoch, batch
after batch, and says of every access whether the sample is resident, whether it stays resident afterwards, and who
else has to leave. All ranks walk the same order, so all reach the same verdicts without a word between them.

Sizes are bytes as the store accounts them. Invariant: after every batch the residents' sizes sum to at most
``capacity_bytes``; a sample larger than the capacity is never admitted.

Legend: B batch · N data set · K accesses of one epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shade.registry import Registry
from shade.types import Bools, Floats, Indices

EMPTY: Indices = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class EpochWindow:
    """What is known when an epoch begins (or is resumed in the middle)."""

    epoch: int
    order_K: Indices
    """The accesses still to come in this epoch, in global order; may hold duplicates."""
    next_order_K: Indices | None
    """The next epoch's, when the sampling mode draws one epoch ahead; otherwise None."""
    score_N: Floats | None = None
    """Importance of each sample at this moment, or None before there is any."""


@dataclass(frozen=True)
class Verdict:
    """What happens to one batch of accesses."""

    hit_B: Bools
    """Resident when accessed, first to last: a second access in the same batch may hit what the first brought in."""
    stay_B: Bools
    """Resident after the whole batch."""
    victims: Indices
    """Samples outside the batch that were resident before it and are not after it."""


class CachePolicy(ABC):
    """Base of all policies; a subclass fills in `_touch` (or `access_many`, when it can do a batch at once).

    Args:
        size_bytes_N: int64 (N,), what each sample would occupy in the store.
        capacity_bytes: Upper bound of the residents' sizes, ≥ 0.
    """

    needs_next_order: bool = False
    """True when `EpochWindow.next_order_K` must be given: the policy plans by the future."""

    def __init__(self, size_bytes_N: npt.NDArray[np.int64], capacity_bytes: int) -> None:
        self.size_bytes_N = np.ascontiguousarray(size_bytes_N, dtype=np.int64)
        self.capacity_bytes = int(capacity_bytes)
        self.resident_N: Bools = np.zeros(len(self.size_bytes_N), dtype=bool)
        self.used_bytes = 0

    def adopt(self, resident: Indices) -> Indices:
        """Starts from what a cache already holds; returns those that do not fit and must be removed."""
        cumulative = np.cumsum(self.size_bytes_N[resident])
        fits = cumulative <= self.capacity_bytes
        kept, refused = resident[fits], resident[~fits]
        self.resident_N[kept] = True
        self.used_bytes = int(self.size_bytes_N[kept].sum())
        self._adopted(kept)
        return refused

    def _adopted(self, kept: Indices) -> None:
        """Hook: the subclass's own bookkeeping for `adopt`."""

    def begin_epoch(self, window: EpochWindow) -> Indices:
        """Takes in what is known of the epoch; returns samples that leave at once."""
        del window
        return EMPTY

    def access_many(self, index_B: Indices) -> Verdict:
        """One batch of accesses, in order. See `Verdict`."""
        hit_B = np.empty(len(index_B), dtype=bool)
        gone: set[int] = set()
        for position, index in enumerate(index_B.tolist()):
            hit_B[position] = self.resident_N[index]
            gone.update(self._touch(index))
        batch = set(index_B.tolist())
        victims = [i for i in gone if not self.resident_N[i] and i not in batch]
        return Verdict(hit_B, self.resident_N[index_B].copy(), np.array(sorted(victims), dtype=np.int64))

    @abstractmethod
    def _touch(self, index: int) -> list[int]:
        """One access: updates ``resident_N`` and ``used_bytes``; returns whom it evicted (``index`` itself included,
        if it was resident and is not any more)."""

    def state_dict(self) -> dict[str, Any]:
        """Residents and bookkeeping."""
        return {"resident": np.flatnonzero(self.resident_N)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes `state_dict` back; what follows is identical."""
        self.resident_N[:] = False
        self.used_bytes = 0
        self.adopt(np.asarray(state["resident"], dtype=np.int64))


POLICIES: Registry[CachePolicy] = Registry("cache policy")

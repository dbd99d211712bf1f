"""What a cache policy is: who is admitted, who stays, who leaves. Arithmetic on arrays: no store, no I/O, no torch.

The simulator and the running cache use the same policy object. It walks the *global* order of an epoch, batch after
batch, and says of every access whether the sample is resident, whether it stays resident, and who else has to leave.
All ranks walk the same order, so all reach the same verdicts without communicating.

Sizes are bytes as the store accounts them. Invariant: after every batch the residents' sizes sum to at most
``capacity_bytes``; a sample larger than the capacity is never admitted; victims leave before the batch arrives.

Legend: B batch · N data set · K accesses of one epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shade.errors import ConfigError
from shade.registry import Registry
from shade.types import Bools, Floats, Indices, Order

EMPTY: Indices = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class EpochPlan:
    """What is known when an epoch begins, or is resumed in the middle; made by the sampler, read by all below it."""

    epoch: int
    order_K: Order
    """All accesses of the epoch, in global order; may hold duplicates."""
    next_order_K: Order | None
    """The next epoch's, if the sampling mode draws one epoch ahead. Empty: there is no next epoch. None: unknown."""
    score_N: Floats | None = None
    """Importance of each sample at this moment, or None before there is any."""
    later_orders: tuple[Order, ...] = ()
    """The epochs after the next one: only the simulator knows them, and only `offline` policies use them."""
    start: int = 0
    """Accesses of ``order_K`` that are done already, after a resume."""
    held_above_N: Bools | None = None
    """(N,) what a faster cache will hold as the epoch ends, so that the next epoch does not need it here; None where
    there is no such cache, or it does not know."""
    has_tier_below: bool = False
    """Whether a slower cache below this one plans the same epoch next, so that what arrives here frees room there."""

    @property
    def rest_K(self) -> Order:
        """Returns the accesses that are still to come."""
        return self.order_K[self.start :]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one batch of accesses."""

    hit_B: Bools
    """Resident when accessed, first to last: a second access in the same batch may hit what the first brought in."""
    stay_B: Bools
    """Resident after the whole batch."""
    victims: Indices
    """Samples outside the batch that were resident before it and are not after it."""


class CachePolicy(ABC):
    """Base of all policies; a subclass fills in `_touch` (or `access_many`, if it can do a batch at once).

    Args:
        size_bytes_N: int64 (N,), the space of each sample in the store; > 0.
        capacity_bytes: Upper bound of the residents' sizes, ≥ 0.

    Raises:
        ConfigError: A size of zero or less, or a negative capacity.
    """

    needs_next_order: bool = False
    """True if the policy plans by the future, so that `EpochPlan.next_order_K` must be given."""

    offline: bool = False
    """True if it wants `EpochPlan.later_orders` too: a bound to compare with, for the simulator only."""

    def __init__(self, size_bytes_N: npt.NDArray[np.int64], capacity_bytes: int) -> None:
        self.size_bytes_N = np.ascontiguousarray(size_bytes_N, dtype=np.int64)
        self.capacity_bytes = int(capacity_bytes)
        if self.capacity_bytes < 0:
            raise ConfigError.of("a cache capacity ≥ 0 bytes", capacity_bytes, "0 turns the cache off")
        if self.size_bytes_N.size and self.size_bytes_N.min() <= 0:
            cure = "give what the store would account for each sample"
            raise ConfigError.of("sizes > 0 bytes", int(self.size_bytes_N.min()), cure)
        self.resident_N: Bools = np.zeros(len(self.size_bytes_N), dtype=bool)
        self.used_bytes = 0
        self._restart(EMPTY)

    def adopt(self, resident: Indices) -> Indices:
        """Replaces the residents by distinct samples that a cache already holds, least worth keeping first if the
        policy knows an order; returns those that do not fit and must be removed."""
        size_bytes = self.size_bytes_N[resident]
        fits = size_bytes <= self.capacity_bytes
        # Oversized samples take no space from those behind them.
        fits &= np.cumsum(size_bytes * fits) <= self.capacity_bytes
        kept, refused = resident[fits], resident[~fits]
        self.resident_N[:] = False
        self.resident_N[kept] = True
        self.used_bytes = int(size_bytes[fits].sum())
        self._restart(kept)
        return refused

    def resize(self, capacity_bytes: int) -> Indices:
        """Changes the capacity, between two batches or before an epoch begins; returns those that leave, least useful
        first."""
        self.capacity_bytes = int(capacity_bytes)
        ranked = self._least_useful_first()
        left_bytes = self.used_bytes - np.cumsum(self.size_bytes_N[ranked])
        num_leaving = 0 if self.used_bytes <= self.capacity_bytes else int((left_bytes > self.capacity_bytes).sum()) + 1
        self.adopt(ranked[num_leaving:])
        return ranked[:num_leaving]

    def _least_useful_first(self) -> Indices:
        """Hook: returns the residents in the order in which they would be evicted, as `adopt` takes them."""
        return np.asarray(self.state_dict()["resident"], dtype=np.int64)

    def _restart(self, kept: Indices) -> None:
        """Hook: rebuilds the subclass's own bookkeeping for exactly these residents; called once at construction with
        none."""
        del kept

    def begin_epoch(self, plan: EpochPlan) -> Indices:
        """Takes in what is known of the epoch (or of its rest, after `load_state_dict`); returns who leaves at once."""
        del plan
        return EMPTY

    def resident_at_end(self) -> Bools | None:
        """Returns (N,) which samples will be resident as the epoch ends; None if the policy does not know."""
        return None

    def access_many(self, index_B: Indices) -> Verdict:
        """Processes one batch of accesses, in order."""
        batch = index_B.tolist()
        hit_B = np.empty(len(batch), dtype=bool)
        resident = self.resident_N.data
        gone: set[int] = set()
        for position, index in enumerate(batch):
            hit_B[position] = resident[index]
            evicted = self._touch(index)
            if evicted:
                gone.update(evicted)
        victims = np.array(sorted(gone.difference(batch)), dtype=np.int64) if gone else EMPTY
        return Verdict(hit_B, self.resident_N[index_B], victims)

    @abstractmethod
    def _touch(self, index: int) -> Sequence[int]:
        """Processes one access: updates residency through `_enter` and `_leave`; returns the evicted samples."""

    def _enter(self, index: int) -> None:
        """Makes ``index`` resident."""
        self.resident_N[index] = True
        self.used_bytes += int(self.size_bytes_N[index])

    def _leave(self, index: int) -> None:
        """Evicts ``index``."""
        self.resident_N[index] = False
        self.used_bytes -= int(self.size_bytes_N[index])

    def state_dict(self) -> dict[str, Any]:
        """Returns residents and bookkeeping."""
        return {"resident": np.flatnonzero(self.resident_N)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a `state_dict`. After `begin_epoch` with the rest of the epoch, what follows is identical."""
        self.adopt(np.asarray(state["resident"], dtype=np.int64))


POLICIES: Registry[CachePolicy] = Registry("cache policy")
"""Name → class. Importing `shade.policy` fills it."""

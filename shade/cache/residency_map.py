"""The residency map: shared memory of one rank that its training process writes and its workers read.

One byte a sample, written when its batch is handed out, read when it is fetched; so no loader has to be patched to send
the plan along. The other way, workers leave their counts here, one row a worker, so no lock is needed and nothing is
lost when a worker ends. The map pickles into workers under fork, spawn and forkserver alike.

Legend: N data set · R counter rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from shade.cache.ledger import FIELDS, Ledger
from shade.types import Bools, Indices

LOOK = 1
"""The sample should be in the cache: look it up."""
STAY = 2
"""The sample should be in the cache after this access."""
NEAR = 4
"""The sample's entry belongs on a server of this machine."""

_PLANNED, _GENERATION, _OPEN_UNTIL, _BACKOFF, _STRIKES, _TRIPS, _LOGGED_BY, _ORIGIN, _ENDING, _CAPACITY = range(10)
_SHARED, _HOME, _OWNED, _OTHERS, _SLOW_WRITES, _SLOW_AT = range(10, 16)
_ROWS = 129


T = TypeVar("T", bound=float)


class _Shared(Generic[T]):
    """An attribute that is a number of the shared state, read as a ``kind``."""

    def __init__(self, position: int, kind: Callable[[float], T]) -> None:
        self._position, self._kind = position, kind

    def __get__(self, owner: ResidencyMap, owner_class: type[ResidencyMap]) -> T:
        return self._kind(owner._state[self._position])

    def __set__(self, owner: ResidencyMap, value: T) -> None:
        owner._state[self._position] = value


class ResidencyMap:
    """Shared state of one rank with N samples."""

    capacity_bytes = _Shared(_CAPACITY, int)
    """What the entries may occupy together now."""
    is_shared = _Shared(_SHARED, bool)
    """Whether other jobs use the cache, too, so that no plan can be exact and `shade.cache.sharing` decides."""
    planned = _Shared(_PLANNED, bool)
    """False until a sampler plans the cache: till then every sample is looked up, and kept while there is space."""
    ending = _Shared(_ENDING, bool)
    """Whether these are an epoch's last batches: a worker with waiting arrivals may not get another one."""

    # The breaker's. Two workers may write them at once; the loser's write is merely late.
    open_until = _Shared(_OPEN_UNTIL, float)
    """Monotonic seconds before which the cache is not asked; 0 while it works."""
    backoff_seconds = _Shared(_BACKOFF, float)
    """The present pause between two attempts."""
    strikes = _Shared(_STRIKES, int)
    """Slow look-ups in a row."""
    slow_writes = _Shared(_SLOW_WRITES, int)
    """A bit for each of the last writes, the newest lowest: whether it was slow."""
    slow_at = _Shared(_SLOW_AT, float)
    """Monotonic seconds when the last slow write ended that counts."""
    trips = _Shared(_TRIPS, int)
    """How often the breaker has opened."""
    logged_by = _Shared(_LOGGED_BY, int)
    """The process that has logged that the cache is out of use."""
    origin_seconds = _Shared(_ORIGIN, float)
    """What a sample from the origin cost lately; 0 while unknown."""

    def __init__(self, num_samples: int) -> None:
        self._flag_tensor_N = torch.zeros(num_samples, dtype=torch.uint8)
        self._held_tensor_N = torch.zeros(num_samples, dtype=torch.uint8)
        self._state_tensor = torch.zeros(16, dtype=torch.float64)
        self._count_tensor_RF = torch.zeros((_ROWS, len(FIELDS)), dtype=torch.int64)
        for tensor in (self._flag_tensor_N, self._held_tensor_N, self._state_tensor, self._count_tensor_RF):
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        self._view()
        self.set_slots([0], [])

    def _view(self) -> None:
        self.flag_N = self._flag_tensor_N.numpy()
        self.held_N = self._held_tensor_N.numpy()
        """What this rank's processes wrote and have not removed, as far as they know."""
        self._state = self._state_tensor.numpy()
        self._count_RF = self._count_tensor_RF.numpy()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name.startswith("_") and "tensor" in name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._view()

    def post(self, index_B: Indices, hit_B: Bools, stay_B: Bools, near_B: Bools | None = None, *, ending: bool) -> None:
        """Writes what is planned for the next access of each sample; of duplicates the first access counts.

        Each sample should be in the cache when it is accessed (``hit_B``) or afterwards (``stay_B``), and its server
        may be on this machine (``near_B``; None if that is not known). ``ending`` marks one of the last batches of the
        epoch.
        """
        flag_B = hit_B.astype(np.uint8) * LOOK + stay_B.astype(np.uint8) * STAY
        if near_B is not None:
            flag_B += near_B.astype(np.uint8) * NEAR
        self.flag_N[index_B[::-1]] = flag_B[::-1]
        self.planned, self.ending = True, ending

    def withdraw(self, index_B: Indices) -> None:
        """Clears what was posted of samples that leave before their batch is fetched."""
        self.flag_N[index_B] = 0

    def set_slots(self, owned: Sequence[int], others: Sequence[int]) -> None:
        """Sets the slots that this job owns (it writes to the first) and the others, which it only reads."""
        self._state[_HOME] = owned[0]
        self._state[_OWNED], self._state[_OTHERS] = (sum(1 << slot for slot in slots) for slots in (owned, others))

    @property
    def owned_slots(self) -> list[int]:
        """Returns this job's slots; it writes to the first."""
        home = int(self._state[_HOME])
        return [home, *(slot for slot in _set_bits(int(self._state[_OWNED])) if slot != home)]

    @property
    def other_slots(self) -> list[int]:
        """Returns the slots of other jobs, and those that no job has taken over yet."""
        return _set_bits(int(self._state[_OTHERS]))

    def ledger(self, worker: int) -> Ledger:
        """Returns the counters of one process, in shared memory: worker -1 is the training process; above 127 workers
        share rows."""
        return Ledger(self._count_RF[(worker + 1) if worker < _ROWS - 1 else _ROWS - 1])

    def totals(self) -> Ledger:
        """Returns a snapshot, summed over all processes of the rank."""
        return Ledger(self._count_RF.sum(axis=0))

    @property
    def generation(self) -> int:
        """Returns how often the residents were counted; a process with an older number drops what it still owed."""
        return int(self._state[_GENERATION])

    def begin_generation(self) -> None:
        """Counts the generation up, after the residents were counted. Only the training process calls it."""
        self._state[_GENERATION] += 1


def _set_bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]

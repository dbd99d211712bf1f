"""The words that every room uses.

Shape suffixes, the same everywhere: B batch · N data set · K drawn in one epoch · W world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

SampleIndex: TypeAlias = int
"""Place of a sample in its data set, 0 ≤ index < N. Scores, weights and keys hang on it, never on a batch position."""

Indices: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]
Bools: TypeAlias = npt.NDArray[np.bool_]
Bytes: TypeAlias = bytes | bytearray | memoryview
"""Whatever a store accepts as a value; it never copies or changes it."""


@runtime_checkable
class Stateful(Protocol):
    """Something whose state can be saved and brought back: the only thing a checkpoint knows of its contents."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue from here: plain numbers, strings, lists, dicts, arrays and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state back; what follows is identical to what would have followed then."""
        ...


@runtime_checkable
class Parted(Stateful, Protocol):
    """Something of which each rank holds a part of its own: where ranks are fewer, those left take over the others'."""

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Takes back the states of all ranks that there were, in any order; the same call on every rank."""
        ...


class Clock(Protocol):
    """Seconds that only grow, as `time.monotonic`; tests hand in a `ManualClock`."""

    def __call__(self) -> float:
        """Seconds since some fixed point."""
        ...


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step cost one rank; JSON-plain. Seconds of stages that overlap do not add up to the step."""

    step: int
    rank: int
    num_samples: int
    """In this rank's part of the batch."""
    compute_seconds: float
    """On the training thread, without waiting for other ranks: applying what is due, forward and backward."""
    compress_seconds: float
    """Choosing, coding, decoding and merging, on whatever thread."""
    exchange_seconds: float
    """In collectives, from the first byte handed over to the last one here, hidden behind the compute or not."""
    wait_seconds: float
    """The training thread stood still for the exchange. Near 0: the link is hidden behind the compute."""
    bytes_sent: int
    """Over this rank's link: with W ranks in a ring, W - 1 times its own payload."""
    bytes_received: int
    density: float
    """Kept fraction of the gradient, as it came to be, not as it was asked for; 0 < density ≤ 1."""
    gradient_norm: float
    """Of the merged gradient."""


@dataclass(frozen=True)
class Decision:
    """What every rank does from one step on, the same on all ranks; JSON-plain."""

    density: float
    """Kept fraction of the gradient, 0 < density ≤ 1."""
    batch_sizes: tuple[int, ...]
    """Samples for each rank, in rank order; empty: as they are."""
    effective_step: int
    """The first step it holds for, on all ranks."""
    reason: str
    """One sentence for people."""

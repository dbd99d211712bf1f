"""Defines the types that every package uses.

Shape suffixes: B batch · N data set · K drawn in one epoch · W world.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

SampleIndex: TypeAlias = int
"""Index of a sample in its data set, 0 ≤ index < N; scores, weights and keys use it, never a batch position."""

Indices: TypeAlias = npt.NDArray[np.int64]
Order: TypeAlias = npt.NDArray[np.signedinteger[Any]]
"""The samples of a whole epoch; those of a draw have 32 bits."""
Floats: TypeAlias = npt.NDArray[np.float32]
Bools: TypeAlias = npt.NDArray[np.bool_]
Bytes: TypeAlias = bytes | bytearray | memoryview
"""Values that a store accepts; it never copies or changes them."""
ModeName: TypeAlias = Literal["unbiased", "uniform", "pads"]
PolicyName: TypeAlias = Literal["plan", "static", "shade", "lru", "lfu", "fifo", "belady", "belady-1"]
FormName: TypeAlias = Literal["encoded", "decoded", "auto"]
StrategyName: TypeAlias = Literal[
    "overlap", "copy", "asymmetric", "acute", "checkfreq", "dash", "datastates", "deepfreeze", "excp", "fastpersist",
    "gemini", "mlc-base", "pccheck", "sync",
]  # fmt: skip
BadSample: TypeAlias = Literal["stop", "skip"]


class ClosedByWith(ABC):
    """A context manager that closes itself at the end of its ``with``."""

    @abstractmethod
    def close(self) -> None:
        """Ends what it has begun."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored; a checkpoint knows no more of its contents."""

    def state_dict(self) -> dict[str, Any]:
        """Returns all that is needed to continue: numbers, strings, lists, dicts, arrays and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state; the object then continues as it would have from there."""
        ...


@runtime_checkable
class Parted(Stateful, Protocol):
    """An object of which each rank holds a part; with fewer ranks, the remaining ones take over the others' parts."""

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores from the states of all former ranks, in any order; the same call on every rank."""
        ...


@runtime_checkable
class Resumed(Stateful, Protocol):
    """An object that knows when an interrupted epoch's rest begins."""

    def at_resume(self, action: Callable[[], None]) -> None:
        """Calls an action then, once."""
        ...


@runtime_checkable
class StepCounting(Stateful, Protocol):
    """An object whose state depends on the steps that training has done."""

    def count_step(self) -> None:
        """Hears that a step is done."""
        ...


class Clock(Protocol):
    """A monotonic clock, such as `time.monotonic`; tests pass a `ManualClock`."""

    def __call__(self) -> float:
        """Returns the seconds since some fixed point."""
        ...


@dataclass(frozen=True)
class StepReport:
    """The cost of one optimizer step on one rank; JSON-plain. Seconds of overlapping stages do not add up to the
    step."""

    step: int
    rank: int
    num_samples: int
    """Samples in this rank's part of the batch."""
    compute_seconds: float
    """Time of the training thread without waits: applying late gradients, forward and backward."""
    compress_seconds: float
    """Time of choosing, coding, decoding and merging, on any thread."""
    exchange_seconds: float
    """Time in collectives, from the first byte sent to the last received, hidden behind the compute or not."""
    latency_seconds: float
    """Time that the exchange would take without its bytes: that of its vote, a few bytes, as often as it has rounds."""
    wait_seconds: float
    """Time that the training thread waited for the exchange. Near 0: the compute hides the link."""
    bytes_sent: int
    """Bytes over this rank's link: with W ranks in a ring, W - 1 times its own payload."""
    bytes_received: int
    density: float
    """Actual kept fraction of the gradient, not the requested one; 0 < density ≤ 1."""
    gradient_norm: float
    """Norm of the merged gradient."""


@dataclass(frozen=True)
class Decision:
    """The settings of all ranks from one step on; JSON-plain."""

    density: float
    """Kept fraction of the gradient, 0 < density ≤ 1."""
    batch_sizes: tuple[int, ...]
    """Samples for each rank, in rank order; empty: unchanged."""
    effective_step: int
    """The first step with this decision, on all ranks."""
    reason: str
    """A sentence for people."""

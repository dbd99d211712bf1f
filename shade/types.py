"""The words that every room uses.

Shape suffixes, the same everywhere: B batch · N data set · K drawn in one epoch · W world.
"""

from __future__ import annotations

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
        """Everything needed to go on from here: plain numbers, strings, lists, dicts, arrays and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state back; what follows is identical to what would have followed then."""
        ...


class Clock(Protocol):
    """Seconds that only grow, as `time.monotonic`; tests hand in a `ManualClock`."""

    def __call__(self) -> float:
        """Seconds since some fixed point."""
        ...

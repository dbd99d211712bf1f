"""The state of a sparse optimizer for a bucket, or a part of one: its moments, and up to which step each line of 16 has
moved.

A line is a cache line of float32: an access to one of its elements loads all of them, so all are brought up to date.
That makes the bookkeeping a sixteenth of what single elements would need, and neighbours of what is touched never lag.

Legend: D bucket · L lines of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shade.gradient._compress.bucket import Bucket
from shade.gradient._compress.compressor import Sparse
from shade.gradient._kernels.lines import LINE, Places, aligned_zeros
from shade.types import Floats

OnTouched = Callable[[Floats, Sequence[Floats], Places, Places, Floats], None]
"""x, moments, last step of each line, indices, values."""
OnLines = Callable[[Floats, Sequence[Floats], Places, int, int], None]
"""x, moments, last step of each line, from line, to line."""


class BucketPart:
    """Neighbouring parameters of a bucket that have taken the same steps; usually all of them.

    A parameter without a gradient on any rank takes no step, as in PyTorch; then its bucket is stepped in parts.

    Args:
        bucket: The bucket.
        places: Of the parameters in it; None: all.
    """

    def __init__(self, bucket: Bucket, places: range | None = None) -> None:
        self.bucket, self.group = bucket, bucket.group
        self.places = range(len(bucket.parameters)) if places is None else places
        self.parameters = bucket.parameters[self.places.start : self.places.stop]
        self._part = bucket.part(self.places)
        self.size = self._part.stop - self._part.start

    def array(self) -> Floats:
        """Returns the weights as a numpy array of the bucket's memory."""
        return self.bucket.array()[self._part]

    def views(self, flat_D: torch.Tensor) -> list[torch.Tensor]:
        """Returns each parameter's part of a flat array of this part's size; see `Bucket.views`."""
        return self.bucket.views(flat_D, self.places)

    def cut(self, sparse: Sparse) -> Sparse:
        """Returns what a gradient of the bucket holds for this part."""
        if self.size == sparse.size:
            return sparse
        first, last = np.searchsorted(sparse.indices_K, (self._part.start, self._part.stop))
        return Sparse(
            sparse.indices_K[first:last] - np.uint32(self._part.start), sparse.values_K[first:last], self.size
        )


class OptimizerMemory:
    """Holds the arrays of one part of a bucket; the optimizer defines what they mean.

    Args:
        part: The part.
        step: Steps that it has taken already.
        history: float64, one column for each lag.
        rows: float32, the coefficients of the last steps.
    """

    def __init__(self, part: BucketPart, step: int, history: npt.NDArray[np.float64], rows: Floats) -> None:
        self.part = part
        self.history, self.rows = history, rows
        self.num_lines = -(-part.size // LINE)
        self.last_L: Places = np.full(self.num_lines, step, dtype=np.uint32)
        self.moments: dict[str, Floats] = {}
        self.parameter_steps = torch.full((len(part.parameters),), float(step))
        """The step, one for each parameter, as PyTorch's optimizers keep it."""
        self.counted = np.zeros(1, dtype=np.int64)
        """A second copy of the step, to which another rank's step can be written."""
        self.step = step

    def advance(self) -> None:
        """Counts one step."""
        self.go_to(self.step + 1)

    def go_to(self, step: int) -> None:
        """Sets the number of steps that have been taken."""
        self.step = step
        self.parameter_steps.fill_(float(step))

    def add_moment(self, name: str) -> Floats:
        """Adds a moment and returns it: zeros, one for each element."""
        # Padded to whole lines, which the loops read and write.
        self.moments[name] = aligned_zeros(self.num_lines * LINE)
        return self.moments[name]

    def views(self, name: str) -> list[torch.Tensor]:
        """Returns a moment as one tensor for each parameter, in the same memory."""
        return self.part.views(torch.from_numpy(self.moments[name][: self.part.size]))

    @property
    def is_behind(self) -> bool:
        """True if some element has not moved up to the last step."""
        return bool(self.moments) and bool((self.last_L != self.step).any())

    def touch(self, sparse: Sparse, apply: OnTouched) -> None:
        """Calls ``apply`` for the touched elements in whole lines, then for those in a last line that is not whole."""
        x, moments = self.part.array(), list(self.moments.values())
        whole = len(x) // LINE
        body = whole * LINE
        if body == len(x):
            apply(x, moments, self.last_L, sparse.indices_K, sparse.values_K)
            return
        cut = int(np.searchsorted(sparse.indices_K, np.uint32(body)))
        if cut:
            heads = [each[:body] for each in moments]
            apply(x[:body], heads, self.last_L[:whole], sparse.indices_K[:cut], sparse.values_K[:cut])
        # The weights belong to the bucket and may end within a line: it goes through an array of its own.
        if cut < sparse.count:
            end = _padded(x[body:])
            ends = [each[body:] for each in moments]
            apply(end, ends, self.last_L[whole:], sparse.indices_K[cut:] - np.uint32(body), sparse.values_K[cut:])
            x[body:] = end[: len(x) - body]

    def sweep(self, start: int, stop: int, apply: OnLines) -> None:
        """Calls ``apply`` for the whole lines of a range, then for a last line that is not whole.

        Args:
            start: First line.
            stop: Behind the last.
            apply: Brings lines up to date.
        """
        x, moments = self.part.array(), list(self.moments.values())
        whole = len(x) // LINE
        body = whole * LINE
        if start < min(stop, whole):
            apply(x[:body], [each[:body] for each in moments], self.last_L[:whole], start, min(stop, whole))
        if stop > whole:
            end = _padded(x[body:])
            apply(end, [each[body:] for each in moments], self.last_L[whole:], 0, 1)
            x[body:] = end[: len(x) - body]

    def lag(self) -> dict[str, Any]:
        """Returns what `resume` needs beyond the moments while something lags."""
        behind = torch.from_numpy((self.step - self.last_L.astype(np.int64)).astype(np.int32))
        return {
            "behind": behind,
            "history": torch.from_numpy(self.history.copy()),
            "rows": torch.from_numpy(self.rows.copy()),
        }

    def resume(self, lag: dict[str, Any]) -> bool:
        """Restores what `lag` returned; returns False, and changes nothing, if the shapes differ."""
        behind, history, rows = (np.asarray(lag[name]) for name in ("behind", "history", "rows"))
        if behind.shape != self.last_L.shape or history.shape != self.history.shape or rows.shape != self.rows.shape:
            return False
        self.last_L[:] = self.step - behind
        self.history[:], self.rows[:] = history, rows
        return True


def _padded(part: Floats) -> Floats:
    """Returns a copy, padded to a whole line with zeros."""
    line = np.zeros(LINE, dtype=np.float32)
    line[: len(part)] = part
    return line

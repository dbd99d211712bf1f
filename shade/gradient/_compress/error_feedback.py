"""Keeps the residual of one bucket on one rank: what was not sent is added to the next gradient.

Invariant: **the sum of all that was sent and of what is kept is the sum of all gradients**, unless the residual decays.
It also holds when values were rounded, a payload was lost, a rank left, or a run resumed from a snapshot.

A step ends in one of three ways. Usually the payload arrives, and nothing is left to do. If the payload did not arrive
but the step counts, `absorb` adds it to the residual again. If the step is cancelled (a NaN on some rank, a GradScaler
that skips), `undo` restores the residual bit for bit.

Cost: two float32 buffers of the bucket's size, and the correction's moments.

Legend: D bucket · K kept.

References:
    Lin et al., "Deep Gradient Compression", ICLR 2018, §3. Differences: decision 0015.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shade.errors import ConfigError, StateMismatchError
from shade.gradient._compress.compressor import Compressor, Key, Sparse, check
from shade.gradient._compress.correction import Correction, Tensors, make_correction_memory, read_array
from shade.gradient._compress.quantiser import Quantiser
from shade.gradient._kernels.build import prepare
from shade.gradient._kernels.lines import aligned_zeros
from shade.types import Floats


def check_size(sparse: Sparse, size: int) -> None:
    """Raises `ConfigError` if a sparse result belongs to a bucket of another size."""
    if sparse.size != size:
        raise ConfigError.of(f"a bucket of {size} elements", sparse.size, "return it to its own bucket")


def _hold(picked: Sparse, held: Sequence[slice], rest_D: Floats) -> Sparse:
    """Puts the picked elements of some parts back into the rest; returns the others."""
    is_sent_K = np.ones(picked.count, dtype=bool)
    for part in held:
        first, last = np.searchsorted(picked.indices_K, (part.start, part.stop))
        is_sent_K[first:last] = False
    if is_sent_K.all():
        return picked
    rest_D[picked.indices_K[~is_sent_K]] = picked.values_K[~is_sent_K]
    return Sparse(picked.indices_K[is_sent_K], picked.values_K[is_sent_K], picked.size)


class ErrorFeedback:
    """Adds, picks, rounds and keeps, for one bucket.

    Args:
        size: D, elements of the bucket.
        compressor: Picks the elements; serves this bucket only.
        quantiser: Rounds the picked values.
        correction: Applied to the gradient, for an optimizer without state; None: none.
        decay: What is left of the residual when the next gradient is added; below 1 old mass is forgotten.
    """

    def __init__(
        self,
        size: int,
        compressor: Compressor,
        quantiser: Quantiser,
        *,
        correction: Correction | None = None,
        decay: float = 1.0,
    ) -> None:
        self.size, self._decay = size, np.float32(decay)
        self.compressor, self.quantiser = compressor, quantiser
        self._residual_D, self._other_residual_D = aligned_zeros(size), aligned_zeros(size)
        self._memory = make_correction_memory(correction, size)
        self._wide_D: Floats | None = None
        self._is_undoable = False

    @property
    def residual_D(self) -> Floats:
        """What is kept, float32 (D,); the live memory, valid until the next `compress` or `undo`."""
        return self._residual_D

    def compress(
        self, gradient_D: torch.Tensor | Floats, density: float, key: Key, held: Sequence[slice] = ()
    ) -> Sparse:
        """Adds a gradient to the residual and picks the elements to send.

        Args:
            gradient_D: Flat, contiguous, on the CPU; float32, bfloat16 or float16; unchanged.
            density: The fraction to send, 0 < density ≤ 1.
            key: The key of this step and bucket.
            held: Parts without a gradient, ascending: nothing of them is sent, and their moments stay.

        Returns:
            The picked elements, with the values that the receiver will see.

        Raises:
            NonFiniteGradientError: The gradient or the sum holds NaN or infinity; nothing has changed.
            ConfigError: The density or the gradient does not fit; nothing has changed.
        """
        added_D = self._as_float32(gradient_D)
        check(added_D, self._residual_D, self._other_residual_D, density)
        # The second buffers are overwritten from here on.
        self._is_undoable = False
        added_D = self._memory.corrected(added_D, held)
        # Into new memory, because `undo` returns to the residual as it was.
        residual_D = self._residual_D if self._decay == 1 else self._residual_D * self._decay
        picked = self.compressor.select(added_D, residual_D, self._other_residual_D, density, key)
        # Before they are rounded: int8 has one scale for neighbours in the message.
        picked = _hold(picked, held, self._other_residual_D)
        seen_K = self.quantiser.decode(self.quantiser.encode(picked.values_K), picked.count)
        prepare().keep_lost(self._other_residual_D, picked.indices_K, picked.values_K, seen_K)
        self._memory.forget(picked.indices_K)
        self._swap()
        self._is_undoable = True
        return Sparse(picked.indices_K.copy(), seen_K, self.size)

    def undo(self) -> None:
        """Reverts the last `compress`, gradient and residual; after another call in between raises `ConfigError`."""
        if not self._is_undoable:
            raise ConfigError.of("a compress() to undo", "none", "undo each compress() at most once")
        self._swap()
        self._is_undoable = False

    def absorb(self, sparse: Sparse) -> None:
        """Adds an undelivered result of `compress`, or a part of it, to the residual: a later step sends it."""
        check_size(sparse, self.size)
        self._residual_D[sparse.indices_K] += sparse.values_K
        self._is_undoable = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as tensors on the live memory: copy them before the next step."""
        return {"residual": torch.from_numpy(self._residual_D), **self._memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state: a missing moment is zero, an unknown one is ignored; `StateMismatchError` changes nothing."""
        residual_D, moments = self._read(state)
        self._residual_D[:] = residual_D
        self._memory.load(moments)
        self._is_undoable = False

    def merge_from(self, state: Mapping[str, Any]) -> None:
        """Adds the state of a rank that has left, or of a larger world; `StateMismatchError` changes nothing."""
        residual_D, moments = self._read(state)
        self._residual_D += residual_D
        self._memory.merge(moments)
        self._is_undoable = False

    def _swap(self) -> None:
        self._residual_D, self._other_residual_D = self._other_residual_D, self._residual_D
        self._memory.swap()

    def _read(self, state: Mapping[str, Any]) -> tuple[Floats, Tensors]:
        if "residual" not in state:
            raise StateMismatchError.of("a residual", sorted(state), "pass what state_dict() returned")
        return read_array(state, "residual", self.size), self._memory.read(state)

    def _as_float32(self, gradient_D: torch.Tensor | Floats) -> Floats:
        if isinstance(gradient_D, np.ndarray):
            return gradient_D
        if gradient_D.device.type != "cpu":
            raise ConfigError.of("a gradient on the CPU", str(gradient_D.device), "use a DeviceErrorFeedback there")
        if gradient_D.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError.of("a float32, bfloat16 or float16 gradient", str(gradient_D.dtype), "convert it first")
        gradient_D = gradient_D.detach()
        if gradient_D.dtype == torch.float32:
            return np.asarray(gradient_D.numpy())
        if gradient_D.shape != (self.size,):
            raise ConfigError.of(
                f"a flat gradient of {self.size} elements", tuple(gradient_D.shape), "flatten it first"
            )
        if self._wide_D is None:
            self._wide_D = aligned_zeros(self.size)
        torch.from_numpy(self._wide_D).copy_(gradient_D)
        return self._wide_D

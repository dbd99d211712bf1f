"""One bucket's memory on one rank: what was not sent yet is added to the next gradient.

Why it works: a coordinate that is small for many steps adds up until it is picked. Nothing is thrown away, only late.
So the invariant is one of bookkeeping: **the sum of all that was sent and of what is kept is the sum of all
gradients**, also when values were rounded on the way, a payload was lost, a rank left, or a run went on from a
snapshot.

A step has three ends. Usually the payload arrives, and nothing is to be done. If it did not arrive, but the step
counts, `absorb` takes it back. If the step shall never have been (a NaN on some rank, a scaler that skips), `undo`
brings the residual back as it was, bit for bit: it still lies in the second buffer.

Before it is added a gradient may be corrected, see `_compress.correction`, and clipped: this rank's own, for what
adds up over steps must not be clipped again. For W ranks Deep Gradient Compression gives each a norm of
``clip_norm / sqrt(W)``.

Price: two float32 buffers of the bucket's size, and what a correction remembers.

Legend: D bucket · K kept.

References:
    Lin et al., "Deep Gradient Compression", ICLR 2018, §3. Where we differ: decision 0015.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shade.errors import ConfigError, StateMismatchError
from shade.gradient._compress.compressor import Compressor, Key, Sparse, check, check_finite
from shade.gradient._compress.correction import Correction, Tensors, make_correction_memory, read_array
from shade.gradient._compress.quantiser import Quantiser
from shade.gradient._kernels.arrays import aligned_zeros
from shade.gradient._kernels.choice import prepare
from shade.types import Floats


def check_clip_norm(clip_norm: float | None) -> None:
    """Looks at a norm.

    Args:
        clip_norm: > 0, or None.

    Raises:
        ConfigError: Out of its range.
    """
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError.of("a clip_norm > 0", clip_norm, "None clips nothing")


def check_size(sparse: Sparse, size: int) -> None:
    """Looks whether something can have come from a bucket.

    Args:
        sparse: Given back.
        size: Of the bucket.

    Raises:
        ConfigError: It is of a bucket of another size.
    """
    if sparse.size != size:
        raise ConfigError.of(f"a bucket of {size} elements", sparse.size, "give it back where it came from")


class ErrorFeedback:
    """Adds, picks, rounds, keeps.

    Args:
        size: D, elements of the bucket.
        compressor: Picks; serves this bucket only.
        quantiser: Rounds what was picked.
        correction: Of the gradient, for an optimizer that remembers nothing; None: none.
        clip_norm: The gradient's largest norm, > 0; None: any.

    Raises:
        ConfigError: A norm of nothing.
    """

    def __init__(
        self,
        size: int,
        compressor: Compressor,
        quantiser: Quantiser,
        *,
        correction: Correction | None = None,
        clip_norm: float | None = None,
    ) -> None:
        check_clip_norm(clip_norm)
        self.size, self.clip_norm = size, clip_norm
        self.compressor, self.quantiser = compressor, quantiser
        self._residual_D, self._other_residual_D = aligned_zeros(size), aligned_zeros(size)
        self._memory = make_correction_memory(correction, size)
        self._wide_D: Floats | None = None
        self._is_undoable = False

    @property
    def residual_D(self) -> Floats:
        """What is kept, float32 (D,), the live memory; valid until the next `compress` or `undo`."""
        return self._residual_D

    def compress(self, gradient_D: torch.Tensor | Floats, density: float, key: Key) -> Sparse:
        """Takes in one gradient and says what to send of it and of what was kept.

        Args:
            gradient_D: Flat, contiguous, on the CPU; float32, bfloat16 or float16; unchanged.
            density: The fraction to send, 0 < density ≤ 1.
            key: Of this step and bucket.

        Returns:
            The picked places, with values as the receiver will see them.

        Raises:
            NonFiniteGradientError: NaN or infinity, in the gradient or in the sum; nothing has changed.
            ConfigError: A bad density or gradient; nothing has changed.
        """
        added_D = self._as_float32(gradient_D)
        check(added_D, self._residual_D, self._other_residual_D, density)
        added_D = self._clipped(added_D)
        self._is_undoable = False  # from here on the other buffers are in use
        added_D = self._memory.correct(added_D)
        picked = self.compressor.select(added_D, self._residual_D, self._other_residual_D, density, key)
        seen_K = self.quantiser.decode(self.quantiser.encode(picked.values_K), picked.count)
        prepare().keep_lost(self._other_residual_D, picked.indices_K, picked.values_K, seen_K)
        self._memory.forget(picked.indices_K)
        self._swap()
        self._is_undoable = True
        return Sparse(picked.indices_K.copy(), seen_K, self.size)

    def undo(self) -> None:
        """Makes the last `compress` not have been: its gradient is forgotten, what was kept before is back.

        Raises:
            ConfigError: There is none to undo, or it was followed by something else than its end.
        """
        if not self._is_undoable:
            raise ConfigError.of("a compress() to undo", "none", "undo each at most once, before anything else")
        self._swap()
        self._is_undoable = False

    def absorb(self, sparse: Sparse) -> None:
        """Takes back what was not delivered: it will be sent with a later gradient.

        Args:
            sparse: What `compress` returned, or any part of it.

        Raises:
            ConfigError: It is of a bucket of another size.
        """
        check_size(sparse, self.size)
        self._residual_D[sparse.indices_K] += sparse.values_K
        self._is_undoable = False

    def state_dict(self) -> dict[str, Any]:
        """What is kept, as tensors on the live memory: copy them before the next step."""
        return {"residual": torch.from_numpy(self._residual_D), **self._memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`; a memory that is missing is empty, one that is not wanted is left out.

        Args:
            state: Of a bucket of the same size.

        Raises:
            StateMismatchError: It does not fit; nothing was loaded.
        """
        residual_D, moments = self._read(state)
        self._residual_D[:] = residual_D
        self._memory.load(moments)
        self._is_undoable = False

    def merge_from(self, state: Mapping[str, Any]) -> None:
        """Adds what another rank kept: one that has left, or one of a larger world.

        Args:
            state: Its `state_dict`.

        Raises:
            StateMismatchError: It does not fit; nothing was added.
        """
        residual_D, moments = self._read(state)
        self._residual_D += residual_D
        self._memory.merge(moments)
        self._is_undoable = False

    def _swap(self) -> None:
        self._residual_D, self._other_residual_D = self._other_residual_D, self._residual_D
        self._memory.swap()

    def _read(self, state: Mapping[str, Any]) -> tuple[Floats, Tensors]:
        """Residual of a state, and what its memory is."""
        if "residual" not in state:
            raise StateMismatchError.of("a residual", sorted(state), "give what state_dict returned")
        return read_array(state, "residual", self.size), self._memory.read(state)

    def _as_float32(self, gradient_D: torch.Tensor | Floats) -> Floats:
        """The gradient, widened into memory of our own where it is not float32."""
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
        torch.from_numpy(self._scratch()).copy_(gradient_D)
        return self._scratch()

    def _scratch(self) -> Floats:
        if self._wide_D is None:
            self._wide_D = aligned_zeros(self.size)
        return self._wide_D

    def _clipped(self, gradient_D: Floats) -> Floats:
        """The gradient, scaled down where its norm is too large."""
        if self.clip_norm is None:
            return gradient_D
        norm = float(torch.linalg.vector_norm(torch.from_numpy(gradient_D), dtype=torch.float64))
        if not np.isfinite(norm):
            check_finite(gradient_D)
        if norm <= self.clip_norm:
            return gradient_D
        np.multiply(gradient_D, np.float32(self.clip_norm / norm), out=self._scratch())
        return self._scratch()

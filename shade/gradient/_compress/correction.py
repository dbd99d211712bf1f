"""Corrects a rank's own gradient before elements are picked: momentum or Adam.

Behind a sparse exchange an optimizer sees an element once in many steps, as the sum of what it missed. Momentum comes
too late then, and Adam divides a sum of 33 gradients by the size of such sums: their common part counts for a fifth of
what it does in dense training. So the moments live here, on every rank, which sees all of its own gradients. The
optimizer behind only multiplies by the learning rate.

====================  ==============================================================================================
`MomentumCorrection`  ``u ← m·u + g``; u becomes 0 where an element was picked (Deep Gradient Compression, §3.2 and
                      §3.3)
`AdamCorrection`      Adam's two moments of this rank's gradient, and ``m̂ / (√v̂ + ε)`` in place of the gradient
                      (Efficient-Adam, algorithm 1; the moments stay when an element is picked)
====================  ==============================================================================================

Cost in float32 buffers of the bucket's size: two with momentum, three with Adam, five with a first moment.

Legend: D bucket · K kept.

References:
    Lin et al., "Deep Gradient Compression", ICLR 2018. Chen et al., "Efficient-Adam", 2022 (arXiv 2205.14473).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from shade.errors import ConfigError, StateMismatchError
from shade.gradient._kernels.build import prepare
from shade.gradient._kernels.lines import Places, aligned_zeros
from shade.types import Floats

Tensors = dict[str, Tensor]
STEPS = "steps"
"""The state's key for the number of gradients that the moments have seen; int64 (1,)."""


class Correction(ABC):
    """Base class of both corrections."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Keys of the moments, each of the bucket's size."""

    @abstractmethod
    def memory(self, size: int) -> CorrectionMemory:
        """Returns empty moments for a bucket of ``size`` elements on the host."""

    @abstractmethod
    def correct(self, moments: Tensors, gradient_D: Tensor) -> tuple[Tensor, Tensors]:
        """Returns a corrected gradient and the new moments, by torch's operations on any device; changes nothing."""

    @abstractmethod
    def forget(self, moments: Tensors, places_K: Tensor) -> None:
        """Clears what picked elements must not keep in the new moments."""

    def read(self, state: Mapping[str, Any], size: int) -> Tensors:
        """Reads the moments of a bucket's state, to the CPU: missing ones are 0, unknown ones are ignored."""
        return {name: torch.from_numpy(read_array(state, name, size)) for name in self.names}

    def merged(self, moments: Tensors, other: Tensors) -> Tensors:
        """Returns this rank's moments after it has taken over another rank's."""
        del other
        return moments


@dataclass(frozen=True)
class MomentumCorrection(Correction):
    """SGD's momentum before the choice, for an optimizer without momentum.

    Args:
        momentum: 0 < momentum < 1.

    Raises:
        ConfigError: The momentum is out of range.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.momentum < 1:
            raise ConfigError.of("a momentum in (0, 1)", self.momentum, "leave the correction out if there is none")

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return ("velocity",)

    @override
    def memory(self, size: int) -> CorrectionMemory:
        return _MomentumMemory(size, self)

    @override
    def correct(self, moments: Tensors, gradient_D: Tensor) -> tuple[Tensor, Tensors]:
        velocity_D = self.momentum * moments.get("velocity", torch.zeros_like(gradient_D)) + gradient_D
        return velocity_D, {"velocity": velocity_D}

    @override
    def forget(self, moments: Tensors, places_K: Tensor) -> None:
        # What was sent has no momentum left.
        moments["velocity"][places_K] = 0

    @override
    def merged(self, moments: Tensors, other: Tensors) -> Tensors:
        return {"velocity": moments.get("velocity", 0) + other["velocity"]}


@dataclass(frozen=True)
class AdamCorrection(Correction):
    """Adam's direction before the choice, for plain SGD (with SGD's weight decay it becomes AdamW).

    Args:
        betas: Decay of the moments, each 0 ≤ beta < 1. The first is 0, because the residual is a mean already and a
            mean of means only comes later (decision 0016); use (0.9, 0.999) if nearly everything is sent.
        eps: Added to the denominator, > 0 in float32.

    Raises:
        ConfigError: One of them is out of range.
    """

    betas: tuple[float, float] = (0.0, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError.of("two betas in [0, 1)", self.betas, "(0, 0.999) suits sparse exchange")
        if not np.float32(self.eps) > 0:
            raise ConfigError.of("eps > 0", self.eps, "1e-8 is usual")

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return ("first_moment", "second_moment") if self.betas[0] else ("second_moment",)

    @override
    def memory(self, size: int) -> CorrectionMemory:
        return _AdamMemory(size, self)

    @override
    def correct(self, moments: Tensors, gradient_D: Tensor) -> tuple[Tensor, Tensors]:
        steps = _steps_of(moments) + 1
        beta1, rest1, beta2, rest2, unbias1, unbias2, eps = self.coefficients(steps).tolist()
        none_D = torch.zeros_like(gradient_D)
        second_D = moments.get("second_moment", none_D) * beta2 + gradient_D * gradient_D * rest2
        corrected, first_D = {"second_moment": second_D, STEPS: torch.tensor([steps])}, gradient_D
        if beta1:
            first_D = corrected["first_moment"] = moments.get("first_moment", none_D) * beta1 + gradient_D * rest1
        return first_D * unbias1 / (second_D.sqrt() * unbias2 + eps), corrected

    @override
    def forget(self, moments: Tensors, places_K: Tensor) -> None:
        pass

    @override
    def read(self, state: Mapping[str, Any], size: int) -> Tensors:
        steps = _steps_of(state)
        return {**super().read(state if steps else {}, size), STEPS: torch.tensor([steps])}

    def coefficients(self, steps: int) -> Floats:
        """Returns β₁, 1 − β₁, β₂, 1 − β₂, the two bias corrections after ``steps`` gradients, this one included, and ε
        as float32 (7,). The fifth multiplies the first moment, the sixth the root of the second."""
        first, second = self.betas
        unbias = 1 / (1 - first**steps), 1 / np.sqrt(1 - second**steps)
        return np.array([first, 1 - first, second, 1 - second, *unbias, self.eps], dtype=np.float32)


class CorrectionMemory(ABC):
    """The moments of one bucket on the host; without a correction there are none."""

    def __init__(self, size: int, correction: Correction | None = None) -> None:
        self.size, self.correction = size, correction
        self._names = () if correction is None else correction.names
        # New moments go to the second ones, so that a cancelled step can be undone, bit for bit.
        self._arrays, self._others = ([aligned_zeros(size) for _ in self._names] for _ in range(2))

    def corrected(self, gradient_D: Floats, held: Sequence[slice] = ()) -> Floats:
        """Does what `correct` does, but leaves the moments of ``held`` parts as they are; those have no gradient."""
        corrected_D = self.correct(gradient_D)
        if held and self._arrays:
            # Momentum's new moment and the corrected gradient are one array.
            corrected_D = corrected_D.copy()
            for part in held:
                corrected_D[part] = 0
                for array_D, other_D in zip(self._arrays, self._others, strict=True):
                    other_D[part] = array_D[part]
        return corrected_D

    @abstractmethod
    def correct(self, gradient_D: Floats) -> Floats:
        """Returns the corrected gradient, valid until the next call; the new moments take effect with `swap`."""

    @abstractmethod
    def forget(self, indices_K: Places) -> None:
        """Clears the moments of picked elements, between `correct` and `swap`."""

    def swap(self) -> None:
        """Commits the new moments; a second call rolls them back."""
        self._arrays, self._others = self._others, self._arrays

    def state_dict(self) -> Tensors:
        """Returns tensors on the live memory."""
        return {name: torch.from_numpy(array_D) for name, array_D in zip(self._names, self._arrays, strict=True)}

    def read(self, state: Mapping[str, Any]) -> Tensors:
        """Reads the moments of a state; see `Correction.read`."""
        return {} if self.correction is None else self.correction.read(state, self.size)

    def load(self, moments: Tensors) -> None:
        """Loads moments that were read."""
        for name, array_D in zip(self._names, self._arrays, strict=True):
            array_D[:] = moments[name].numpy()

    def merge(self, moments: Tensors) -> None:
        """Takes over another rank's moments; see `Correction.merged`."""
        if self.correction is not None:
            self.load(self.correction.merged(self.state_dict(), moments))


class _NoMemory(CorrectionMemory):
    def correct(self, gradient_D: Floats) -> Floats:
        return gradient_D

    def forget(self, indices_K: Places) -> None:
        """There is nothing to clear."""


class _MomentumMemory(CorrectionMemory):
    correction: MomentumCorrection

    def correct(self, gradient_D: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):  # the sum is checked later
            prepare().gain_momentum(self._arrays[0], gradient_D, self.correction.momentum, self._others[0])
        return self._others[0]

    def forget(self, indices_K: Places) -> None:
        prepare().clear(self._others[0], indices_K)


class _AdamMemory(CorrectionMemory):
    correction: AdamCorrection

    def __init__(self, size: int, correction: AdamCorrection) -> None:
        super().__init__(size, correction)
        self._direction_D = aligned_zeros(size)
        self._steps, self._other_steps = 0, 0

    def correct(self, gradient_D: Floats) -> Floats:
        self._other_steps = self._steps + 1
        coefficients = self.correction.coefficients(self._other_steps)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # the sum is checked later
            if self.correction.betas[0]:
                (first_D, second_D), (new_first_D, new_second_D) = self._arrays, self._others
                correct = prepare().gain_adam
                correct(first_D, second_D, gradient_D, coefficients, new_first_D, new_second_D, self._direction_D)
            else:
                (second_D,), (new_second_D,) = self._arrays, self._others
                prepare().gain_second(second_D, gradient_D, coefficients, new_second_D, self._direction_D)
        return self._direction_D

    def forget(self, indices_K: Places) -> None:
        """The moments stay."""

    def swap(self) -> None:
        super().swap()
        self._steps, self._other_steps = self._other_steps, self._steps

    def state_dict(self) -> Tensors:
        return {**super().state_dict(), STEPS: torch.tensor([self._steps])}

    def load(self, moments: Tensors) -> None:
        super().load(moments)
        self._steps = _steps_of(moments)


def make_correction_memory(correction: Correction | None, size: int) -> CorrectionMemory:
    """Returns a bucket's empty moments on the host; without a correction the gradients stay as they are."""
    return _NoMemory(size) if correction is None else correction.memory(size)


def read_array(state: Mapping[str, Any], name: str, size: int) -> Floats:
    """Reads a float32 array (size,) of a bucket's state, zeros without the key; `StateMismatchError` if unfit."""
    if name not in state:
        return np.zeros(size, dtype=np.float32)
    array_D: Floats = torch.as_tensor(state[name]).detach().to("cpu", torch.float32).numpy()
    if array_D.shape != (size,):
        cure = "flatten the same parameters into the same buckets"
        raise StateMismatchError.of(f"a {name} of {size} elements", array_D.shape, cure)
    if not np.isfinite(array_D).all():
        raise StateMismatchError.of(f"a finite {name}", "NaN or infinity", "resume from an earlier snapshot")
    return array_D


def _steps_of(state: Mapping[str, Any]) -> int:
    return int(torch.as_tensor(state[STEPS]).reshape(-1)[0]) if STEPS in state else 0

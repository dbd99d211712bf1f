"""What a rank makes of its own gradient before anything is chosen of it: what an optimizer would have remembered.

Behind a sparse exchange an optimizer sees an element once in many steps, and then the sum of what it missed. Momentum
comes too late then, and Adam divides a sum of 33 gradients by the size of such sums: what is common to them counts for
a fifth of what it does in dense training. So what has a memory is done here, on every rank, where every gradient of
this rank is seen; its result is what adds up in the residual, is chosen, sent and averaged. The optimizer behind only
multiplies with the learning rate.

====================  ==============================================================================================
`MomentumCorrection`  ``u ← m·u + g``, and u is 0 where something was picked: what was sent has no momentum left
                      (Deep Gradient Compression, §3.2 and §3.3)
`AdamCorrection`      Adam's two moments of this rank's gradient, and ``m̂ / (√v̂ + ε)`` for the gradient
                      (Efficient-Adam, algorithm 1; its moments stay when something is picked). Without a first
                      moment, unless it is asked for: what waits in the residual is averaged there
====================  ==============================================================================================

A memory writes beside what it remembers, so that a step which shall never have been can be undone, bit for bit.

Price in float32 buffers of the bucket's size: two with momentum, three with Adam, five if it has a first moment.

Legend: D bucket · K kept.

References:
    Lin et al., "Deep Gradient Compression", ICLR 2018. Chen et al., "Efficient-Adam", 2022 (arXiv 2205.14473).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shade.errors import ConfigError, StateMismatchError
from shade.gradient._kernels.arrays import Places, aligned_zeros
from shade.gradient._kernels.choice import prepare
from shade.types import Floats

Tensors = dict[str, Tensor]
STEPS = "steps"
"""Key of a state: how many gradients its moments have seen; int64 (1,)."""


class Correction(ABC):
    """Base of both."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Keys of what is remembered, each of the bucket's size."""

    @abstractmethod
    def memory(self, size: int) -> CorrectionMemory:
        """For a bucket of ``size`` elements on the host."""

    @abstractmethod
    def correct(self, moments: Tensors, gradient_D: Tensor) -> tuple[Tensor, Tensors]:
        """What a memory on the host does, in torch's operations.

        Args:
            known: What is remembered; empty at first; unchanged.
            gradient_D: On any device; unchanged.

        Returns:
            What to add in its place, and what is to be remembered.
        """

    @abstractmethod
    def forget(self, moments: Tensors, places_K: Tensor) -> None:
        """What was picked, in what was just gained."""

    def read(self, state: Mapping[str, Any], size: int) -> Tensors:
        """What is remembered in a bucket's state.

        Args:
            state: Of any kind; what is missing is 0, what is not known is left out.
            size: D.

        Returns:
            Tensors on the CPU, by name.

        Raises:
            StateMismatchError: It does not fit.
        """
        return {name: torch.from_numpy(read_array(state, name, size)) for name in self.names}

    def merged(self, moments: Tensors, other: Tensors) -> Tensors:
        """What is remembered once another rank has left what it had still to give.

        Args:
            known: This rank's.
            other: From `read`.

        Returns:
            As ``known``.
        """
        del other
        return moments


@dataclass(frozen=True)
class MomentumCorrection(Correction):
    """SGD's momentum before the choice, for an optimizer that has none.

    Args:
        momentum: 0 < momentum < 1.

    Raises:
        ConfigError: Another one.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.momentum < 1:
            raise ConfigError.of("a momentum in (0, 1)", self.momentum, "leave the correction out if there is none")

    @property
    def names(self) -> tuple[str, ...]:
        """See `Correction`."""
        return ("velocity",)

    def memory(self, size: int) -> CorrectionMemory:
        """See `Correction`."""
        return _MomentumMemory(size, self)

    def correct(self, moments: Tensors, gradient_D: Tensor) -> tuple[Tensor, Tensors]:
        """See `Correction`."""
        velocity_D = self.momentum * moments.get("velocity", torch.zeros_like(gradient_D)) + gradient_D
        return velocity_D, {"velocity": velocity_D}

    def forget(self, moments: Tensors, places_K: Tensor) -> None:
        """See `Correction`: what was sent has no momentum left."""
        moments["velocity"][places_K] = 0

    def merged(self, moments: Tensors, other: Tensors) -> Tensors:
        """See `Correction`: velocity is gradient that is still to come."""
        return {"velocity": moments.get("velocity", 0) + other["velocity"]}


@dataclass(frozen=True)
class AdamCorrection(Correction):
    """Adam's direction before the choice, for plain SGD (with its weight decay: for AdamW's).

    Args:
        betas: Of the moments, each 0 ≤ beta < 1. The first is 0, for the residual is a mean already, and a mean of
            means only comes later (decision 0016); (0.9, 0.999) if nearly everything is sent.
        eps: Added to the denominator, > 0 in float32.

    Raises:
        ConfigError: One of them out of its range.
    """

    betas: tuple[float, float] = (0.0, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError.of("two betas in [0, 1)", self.betas, "(0, 0.999) suit what is sparse")
        if not np.float32(self.eps) > 0:
            raise ConfigError.of("eps > 0", self.eps, "1e-8 is usual")

    @property
    def names(self) -> tuple[str, ...]:
        """See `Correction`; there is no first moment to keep where its beta is 0."""
        return ("first_moment", "second_moment") if self.betas[0] else ("second_moment",)

    def memory(self, size: int) -> CorrectionMemory:
        """See `Correction`."""
        return _AdamMemory(size, self)

    def correct(self, moments: Tensors, gradient_D: Tensor) -> tuple[Tensor, Tensors]:
        """See `Correction`."""
        steps = _steps_of(moments) + 1
        beta1, rest1, beta2, rest2, unbias1, unbias2, eps = self.coefficients(steps).tolist()
        none_D = torch.zeros_like(gradient_D)
        second_D = moments.get("second_moment", none_D) * beta2 + gradient_D * gradient_D * rest2
        corrected, first_D = {"second_moment": second_D, STEPS: torch.tensor([steps])}, gradient_D
        if beta1:
            first_D = corrected["first_moment"] = moments.get("first_moment", none_D) * beta1 + gradient_D * rest1
        return first_D * unbias1 / (second_D.sqrt() * unbias2 + eps), corrected

    def forget(self, moments: Tensors, places_K: Tensor) -> None:
        """See `Correction`: moments stay."""

    def read(self, state: Mapping[str, Any], size: int) -> Tensors:
        """See `Correction`; moments that nobody counted are none."""
        steps = _steps_of(state)
        return {**super().read(state if steps else {}, size), STEPS: torch.tensor([steps])}

    def coefficients(self, steps: int) -> Floats:
        """β₁, 1 − β₁, β₂, 1 − β₂, what removes the moments' bias, and ε.

        Args:
            steps: How many gradients the moments have seen, this one included.

        Returns:
            float32 (7,): the fifth multiplies the first moment, the sixth the root of the second.
        """
        first, second = self.betas
        unbias = 1 / (1 - first**steps), 1 / np.sqrt(1 - second**steps)
        return np.array([first, 1 - first, second, 1 - second, *unbias, self.eps], dtype=np.float32)


class CorrectionMemory(ABC):
    """What a correction remembers of one bucket on the host.

    Args:
        size: D.
        correction: None: nothing.
    """

    def __init__(self, size: int, correction: Correction | None = None) -> None:
        self.size, self.correction = size, correction
        self._names = () if correction is None else correction.names
        self._arrays, self._others = ([aligned_zeros(size) for _ in self._names] for _ in range(2))

    @abstractmethod
    def correct(self, gradient_D: Floats) -> Floats:
        """Takes in a gradient; takes effect with `swap`.

        Args:
            gradient_D: Unchanged.

        Returns:
            What to add in its place; valid until the next call.
        """

    @abstractmethod
    def forget(self, indices_K: Places) -> None:
        """What was picked, between `gain` and `swap`."""

    def swap(self) -> None:
        """What was gained counts; once more: it never did."""
        self._arrays, self._others = self._others, self._arrays

    def state_dict(self) -> Tensors:
        """Tensors on the live memory."""
        return {name: torch.from_numpy(array_D) for name, array_D in zip(self._names, self._arrays, strict=True)}

    def read(self, state: Mapping[str, Any]) -> Tensors:
        """See `Correction.read`."""
        return {} if self.correction is None else self.correction.read(state, self.size)

    def load(self, moments: Tensors) -> None:
        """Goes on from what was read."""
        for name, array_D in zip(self._names, self._arrays, strict=True):
            array_D[:] = moments[name].numpy()

    def merge(self, moments: Tensors) -> None:
        """See `Correction.merged`."""
        if self.correction is not None:
            self.load(self.correction.merged(self.state_dict(), moments))


class _NoMemory(CorrectionMemory):
    def correct(self, gradient_D: Floats) -> Floats:
        return gradient_D

    def forget(self, indices_K: Places) -> None:
        """There is nothing."""


class _MomentumMemory(CorrectionMemory):
    correction: MomentumCorrection

    def correct(self, gradient_D: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):  # the sum will be looked at
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
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # the sum will be looked at
            if self.correction.betas[0]:
                (first_D, second_D), (new_first_D, new_second_D) = self._arrays, self._others
                correct = prepare().gain_adam
                correct(first_D, second_D, gradient_D, coefficients, new_first_D, new_second_D, self._direction_D)
            else:
                (second_D,), (new_second_D,) = self._arrays, self._others
                prepare().gain_second(second_D, gradient_D, coefficients, new_second_D, self._direction_D)
        return self._direction_D

    def forget(self, indices_K: Places) -> None:
        """Moments stay."""

    def swap(self) -> None:
        super().swap()
        self._steps, self._other_steps = self._other_steps, self._steps

    def state_dict(self) -> Tensors:
        return {**super().state_dict(), STEPS: torch.tensor([self._steps])}

    def load(self, moments: Tensors) -> None:
        super().load(moments)
        self._steps = _steps_of(moments)


def make_correction_memory(correction: Correction | None, size: int) -> CorrectionMemory:
    """A bucket's, on the host.

    Args:
        correction: None: gradients stay as they are.
        size: D.

    Returns:
        Its memory, empty.
    """
    return _NoMemory(size) if correction is None else correction.memory(size)


def read_array(state: Mapping[str, Any], name: str, size: int) -> Floats:
    """One array of a state.

    Args:
        state: Of a bucket.
        name: Its key; 0 if it is not there.
        size: D.

    Returns:
        float32 (D,).

    Raises:
        StateMismatchError: Of another size, or not finite.
    """
    if name not in state:
        return np.zeros(size, dtype=np.float32)
    array_D: Floats = torch.as_tensor(state[name]).detach().to("cpu", torch.float32).numpy()
    if array_D.shape != (size,):
        cure = "flatten the same parameters into the same buckets"
        raise StateMismatchError.of(f"a {name} of {size} elements", array_D.shape, cure)
    if not np.isfinite(array_D).all():
        raise StateMismatchError.of(f"a finite {name}", "NaN or infinity", "go on from an earlier snapshot")
    return array_D


def _steps_of(state: Mapping[str, Any]) -> int:
    """How many gradients the moments of a state have seen; 0 if it does not say."""
    return int(torch.as_tensor(state[STEPS]).reshape(-1)[0]) if STEPS in state else 0

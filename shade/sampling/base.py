"""What a sampling mode is: which samples an epoch uses, in which order, and what each gradient weighs.

A draw is a pure function of (seed, epoch, scores), so every rank draws the same global order for itself, and takes its
share by position (`dealing`). Invariant: ``order_K`` depends on nothing but (seed, epoch, scores, settings): not on
ranks, workers or the cache, as long as the global batch stays. (`pads` also depends on the cache and on validation.)

Legend: N data set · K drawn in one epoch · C classes · G global batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shade.errors import ConfigError
from shade.registry import Registry
from shade.types import Bools, Floats, Order

Units = npt.NDArray[np.uint32]
"""Probabilities in units of 2**-30."""

Classes = npt.NDArray[np.unsignedinteger[Any]]
"""The class of each sample, 0 … C−1."""


@dataclass(frozen=True)
class Scores:
    """The importance scores while a draw is made; later reports may change the arrays."""

    score_N: Floats
    """Float32, ≥ 0; only the ratios matter."""
    seen_N: Bools
    """False: no loss was ever reported for this sample; its score means nothing."""


@dataclass(frozen=True)
class Receipt:
    """The unbiasedness receipt of one draw: numbers a reader can check (Horvitz–Thompson, see docs/decisions)."""

    drawn: int
    """K, samples in the epoch."""
    mean_inclusion: float
    """Mean inclusion probability; K / N up to rounding."""
    weight_sum_z: float
    """(Σ 1/pi over the drawn − N) / its standard deviation; |z| > 4 means the draw is broken. 0 for full epochs, nan
    for a mode that is biased by design and so makes no such claim."""
    effective_sample_size: float
    """(Σ w)² / Σ w² over the drawn."""
    max_weight: float
    """Largest gradient weight."""
    class_drift: float
    """Largest |weighted share − true share| over classes; nan without targets."""


class Sums(NamedTuple):
    """The sums that the receipt of a draw is made of; pi is 1 / weight."""

    drawn_C: npt.NDArray[np.float64]
    """Σ weight of the drawn, by class."""
    squares: float
    """Σ weight² of the drawn."""
    largest: float
    """The largest weight of the drawn."""
    pi_C: npt.NDArray[np.float64]
    """Σ pi of all samples, by class."""
    spread_C: npt.NDArray[np.float64]
    """Σ pi (1 − pi)."""
    left_out_C: npt.NDArray[np.float64]
    """Σ (1 − pi)."""
    within_C: npt.NDArray[np.float64]
    """Σ (1 − pi) / pi."""


@dataclass(frozen=True)
class Draw:
    """One epoch, drawn."""

    epoch: int
    order_K: Order
    """int32 (K,): the global order."""
    weight_N: Floats | None
    """float32 (N,): gradient weight 1/pi by sample index; None means 1 for all."""
    receipt: Receipt


@dataclass(frozen=True)
class Validation:
    """The history of validation accuracy; only `pads` uses it."""

    accuracies: tuple[float, ...] = field(default_factory=tuple)
    """One number per finished epoch, oldest first."""


class SamplingMode(ABC):
    """Base of all modes.

    Args:
        num_samples: N.
        global_batch: G = batch size × ranks; K is a multiple of it, or N.
        seed: The same on every rank.

    Raises:
        ConfigError: ``num_samples`` or ``global_batch`` below 1, or 2**31 samples or more.
    """

    draws_ahead: bool
    """True if epoch e+1 may be drawn as epoch e begins, from the scores of that moment."""

    uses_weights: bool
    """True if gradients must be multiplied by ``weight_N`` to stay unbiased."""

    uses_scores: bool
    """True if the mode needs reported losses."""

    default_policy: str
    """The cache policy that suits it."""

    default_score: str
    """The importance score that suits it; any will do if ``uses_scores`` is False."""

    def __init__(self, num_samples: int, global_batch: int, seed: int) -> None:
        if num_samples < 1:
            raise ConfigError.of("num_samples ≥ 1", num_samples, "check the path of the data set")
        if num_samples >= 2**31:
            raise ConfigError.of("num_samples < 2**31: orders have 32 bits", num_samples, "split the data set")
        if global_batch < 1:
            raise ConfigError.of("global_batch ≥ 1", global_batch, "give batch size × ranks")
        self.num_samples = num_samples
        self.global_batch = global_batch
        self.seed = seed

    @abstractmethod
    def draw(
        self,
        epoch: int,
        scores: Scores | None,
        *,
        resident_N: Bools | None = None,
        validation: Validation | None = None,
    ) -> Draw:
        """Draws an epoch.

        Args:
            epoch: ≥ 0.
            scores: The snapshot to draw from; None before there is any.
            resident_N: The samples in the cache; only `pads` uses it.
            validation: The history of validation; only `pads` uses it.

        Returns:
            The draw. The same arguments give the same draw, bit for bit, on any machine.
        """

    def num_drawn(self, epoch: int) -> int:
        """Returns how many samples an epoch draws if the losses of all samples are reported."""
        del epoch
        return self.num_samples


class Purpose(IntEnum):
    """The uses of random numbers. Each has its own stream, so adding one never shifts another."""

    SHUFFLE = 0
    """The order in which an epoch is walked."""
    ARRANGE = 1
    """The order in which a draw walks the data set."""
    START = 2
    """The one random number of a systematic draw."""
    DRAW = 3
    """Draws with replacement."""
    TIES = 4
    """Which of several equals comes first."""
    REPLICATE = 5
    """Which samples are repeated one time more if a replication factor is not whole."""
    MIXTURE = 6
    """The order of one pass over one source of a mixture."""
    WINDOW = 7
    """The sequence of the blocks of an epoch, and how far its samples are shifted."""


def generator(seed: int, epoch: int, purpose: int) -> np.random.Generator:
    """Makes a counter-based generator for one (seed, epoch, purpose): no state travels between epochs or ranks."""
    # Philox takes a key of two words; 8 bits suffice for the purposes.
    key = np.array([seed & (2**64 - 1), (epoch << 8) | purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


ONE = 1 << 30
"""Probability 1, in units."""

LARGE = 1 << 24
"""A set of more samples is drawn by `shade.sampling.large`, whose order for a seed is another one."""


MAX_PROBES: Final = 200
"""Bracketed Newton: 4 to 8 probes in practice; each halves the bracket at worst."""


def is_large(num_samples: int) -> bool:
    """Returns whether `shade.sampling.large` draws a set of so many samples."""
    return num_samples > LARGE


def parts(num_samples: int) -> Iterator[slice]:
    """Yields the parts in which whole arrays are passed through, where a pass needs memory of its own."""
    for start in range(0, num_samples, 1 << 16):
        yield slice(start, start + (1 << 16))


def scale_for(goal: float, probe: Callable[[float], tuple[float, float]], scale: float, largest: float) -> float:
    """Solves ``total(scale) = goal`` for a total that grows with the scale, from a first guess.

    Args:
        goal: Reached to one part in 10**12.
        probe: Returns the total at a scale, and how fast it grows there.
        scale: The first guess.
        largest: At this scale the total is the goal or more.

    Returns:
        The scale that was probed last, unless `MAX_PROBES` did not come close enough.
    """
    low, high = 0.0, largest
    for _ in range(MAX_PROBES):
        total, slope = probe(scale)
        excess = total - goal
        if abs(excess) <= 1e-12 * goal:
            break
        low, high = (low, scale) if excess > 0 else (scale, high)
        # Newton within the bracket, bisection where it would leave it.
        step = scale - excess / slope if slope > 0 else low
        scale = step if low < step < high else (low + high) / 2
    return scale


def picked(value_N: Floats, order_K: Order) -> Floats:
    """Returns ``value_N[order_K]`` without the copy of all indices that numpy makes of 32-bit ones."""
    value_K = np.empty(len(order_K), dtype=value_N.dtype)
    for part in parts(len(order_K)):
        value_K[part] = value_N[order_K[part]]
    return value_K


MODES: Registry[SamplingMode] = Registry("sampling mode")

Targets = npt.NDArray[np.int64]
"""The class of each sample, (N,); any integers."""

"""What a sampling mode is: which samples an epoch uses, in which order, and what each gradient weighs.

A draw is a pure function of (seed, epoch, scores): a counter-based generator keyed by seed and epoch, no hidden state,
so every rank draws the same global order for itself. Ranks share it by position: step ``t`` of an epoch is
``order_K[t*G : (t+1)*G]`` with G the global batch, and rank ``r`` takes the ``r``-th of W contiguous pieces of it.

Invariant: ``order_K`` depends on nothing but (seed, epoch, scores, settings): not on ranks, workers or the cache,
as long as the global batch stays.

Legend: N data set · K drawn in one epoch · C classes · G global batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shade.registry import Registry
from shade.types import Bools, Floats, Indices


@dataclass(frozen=True)
class Scores:
    """Importance as a sampling mode sees it: a snapshot, never the live table."""

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
    """(Σ 1/pi over the drawn − N) / its standard deviation; |z| > 4 means the draw is broken. 0 for full epochs."""
    effective_sample_size: float
    """(Σ w)² / Σ w² over the drawn."""
    max_weight: float
    """Largest gradient weight."""
    class_drift: float
    """Largest |weighted share − true share| over classes; nan without targets."""


@dataclass(frozen=True)
class Draw:
    """One epoch, drawn."""

    epoch: int
    order_K: Indices
    """int64 (K,): the global order."""
    weight_N: Floats | None
    """float32 (N,): gradient weight 1/pi by sample index; None means 1 for all."""
    receipt: Receipt


@dataclass(frozen=True)
class Validation:
    """How validation accuracy moved; only `pads` looks at it."""

    accuracies: tuple[float, ...] = field(default_factory=tuple)
    """One number per finished epoch, oldest first."""


class SamplingMode(ABC):
    """Base of all modes.

    Args:
        num_samples: N.
        global_batch: G = batch size × ranks; K is a multiple of it unless the epoch is full.
        seed: Same on every rank.
    """

    draws_ahead: bool
    """True when epoch e+1 may be drawn as epoch e begins, from the scores of that moment."""

    uses_weights: bool
    """True when gradients must be multiplied by ``weight_N`` to stay unbiased."""

    uses_scores: bool
    """True when losses must be reported for the mode to mean anything."""

    default_policy: str
    """The cache policy that suits it."""

    def __init__(self, num_samples: int, global_batch: int, seed: int) -> None:
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
            resident_N: What the cache holds; only `pads` looks at it.
            validation: How validation moved; only `pads` looks at it.

        Returns:
            The draw. The same arguments give the same draw, bit for bit, on any machine.
        """


def generator(seed: int, epoch: int, purpose: int) -> np.random.Generator:
    """A counter-based generator for one (seed, epoch, purpose): no state travels between epochs or ranks."""
    return np.random.Generator(np.random.Philox(key=[(seed & (2**64 - 1)), (epoch << 8) | purpose]))


MODES: Registry[SamplingMode] = Registry("sampling mode")

Targets = npt.NDArray[np.int64]


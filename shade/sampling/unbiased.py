"""Uses a share of the data set each epoch, the rest rarely, and weighs every gradient so that nothing is biased.

A sample with score s is drawn with probability ``pi = clip(c·sqrt(s), pi_min, 1)``, without replacement, and its
gradient counts ``1 / pi`` times, so the expected gradient sum of an epoch is that of the full data set, whatever the
scores are: stale, noisy or wrong scores cost variance, never bias. Skipped samples are neither read nor computed;
because the set is known one epoch ahead, the cache can plan for it exactly.

Why this way: sqrt flattens the loss (variance is least for pi in proportion to the gradient's norm, of which the loss
is a rough and heavy-tailed stand-in); ``pi_min`` bounds the weight at ``1 / pi_min``; scores above their 95th
percentile count as that percentile, so that a few mislabelled samples do not take the budget of the rest; the first
``warmup_epochs`` and, when ``epochs`` is known, the last eighth are full, which ends training on the exact objective.

The price: an epoch has ``keep`` as many steps, each with ``1 / keep`` times the expected gradient; a schedule that
counts steps must be told. Variance rises by ``Σ (1/pi − 1)|g|² / N²``.

Invariants: Σ pi = K; pi ≥ pi_min; a sample never seen has pi = 1; no duplicates; with ``keep=1.0`` every epoch is that
of `uniform`, bit for bit.

References:
    Qin et al., "InfoBatch", ICLR 2024, for rescaled pruning and the full last epochs; Katharopoulos & Fleuret, "Not All
    Samples Are Created Equal", ICML 2018, for scores. Where we differ: docs/decisions/0004-sampling.md.

Legend: N data set · K drawn in one epoch · C classes.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from shade.errors import ConfigError
from shade.sampling.base import MODES, Draw, Purpose, SamplingMode, Scores, Targets, Validation, generator
from shade.sampling.inclusion import ONE, Units, budget, solve_units
from shade.sampling.receipt import measure
from shade.sampling.systematic import draw_systematic
from shade.sampling.uniform import full_epoch
from shade.types import Bools, Floats

FULL_TAIL_FRACTION = 0.125
"""Share of the run, at its end, that uses every sample: InfoBatch's figure."""
NOISE_CAP = 0.95
"""Scores above this quantile of the seen ones count as the quantile."""
SMALLEST_ROOT = 1e-3
"""Smallest sqrt(score) as a share of the largest: keeps a loss of 0 from needing an infinite c."""


@MODES.register("unbiased")
class UnbiasedMode(SamplingMode):
    """Horvitz–Thompson sampling of an epoch; see the top of the file.

    Args:
        num_samples: N.
        global_batch: G.
        seed: Same on every rank.
        keep: Share of the data set an epoch uses, in (0, 1]. 1.0 is a plain shuffle without weights.
        pi_min: Smallest inclusion probability, in (0, keep]; the largest weight is its inverse.
        warmup_epochs: Full epochs at the start, ≥ 0. Two: epoch 1 is drawn as epoch 0 begins, before any loss is known.
        epochs: Length of the run, when known; its last eighth is full then.
        targets_N: Class of each sample: the draw is stratified, and each class with a member keeps at least
            ``max(1, ⌊pi_min·n⌋)`` of its n.
        draws_ahead: Whether the next epoch is drawn as this one begins: scores one epoch older, cache planned exactly.

    Raises:
        ConfigError: An argument out of its range.
    """

    default_policy = "plan"
    default_score = "loss"

    def __init__(
        self,
        num_samples: int,
        global_batch: int,
        seed: int,
        *,
        keep: float = 0.7,
        pi_min: float = 0.3,
        warmup_epochs: int = 2,
        epochs: int | None = None,
        targets_N: Targets | None = None,
        draws_ahead: bool = True,
    ) -> None:
        super().__init__(num_samples, global_batch, seed)
        if not 0.0 < keep <= 1.0:
            raise ConfigError.of("keep in (0, 1]", keep, "use 0.7, or 1.0 for every sample every epoch")
        if not 0.0 < pi_min <= 1.0 or (keep < 1.0 and pi_min > keep):
            raise ConfigError.of(f"pi_min in (0, keep={keep}]", pi_min, "lower pi_min or raise keep")
        if warmup_epochs < 0:
            raise ConfigError.of("warmup_epochs ≥ 0", warmup_epochs, "use 2")
        if epochs is not None and epochs < 1:
            raise ConfigError.of("epochs ≥ 1 or None", epochs, "give the length of the run, or leave it out")
        self.keep = keep
        self.pi_min = pi_min
        self.draws_ahead = draws_ahead
        self.uses_weights = self.uses_scores = keep < 1.0
        self._warmup_epochs = warmup_epochs
        self._tail_from = math.inf if epochs is None else epochs - math.ceil(epochs * FULL_TAIL_FRACTION)
        self._class_N = None if targets_N is None else _as_classes(targets_N, num_samples)
        self._num_wanted = budget(num_samples, global_batch, keep)
        self._floor_N = self._class_floor()

    def draw(
        self,
        epoch: int,
        scores: Scores | None,
        *,
        resident_N: Bools | None = None,
        validation: Validation | None = None,
    ) -> Draw:
        """See `SamplingMode.draw`. More than K are drawn when samples never seen fill the budget."""
        del resident_N, validation
        units_N = None if scores is None or self._is_full(epoch) else self._inclusion(scores)
        if units_N is None:
            return full_epoch(self.num_samples, self.seed, epoch, has_classes=self._class_N is not None)
        order_K = draw_systematic(units_N, self.seed, epoch, self._class_N)
        generator(self.seed, epoch, Purpose.SHUFFLE).shuffle(order_K)
        weight_N = np.empty(self.num_samples, dtype=np.float32)
        np.divide(float(ONE), units_N, out=weight_N, casting="same_kind")
        return Draw(epoch, order_K, weight_N, measure(order_K, weight_N, self._class_N))

    def _is_full(self, epoch: int) -> bool:
        """Whether this epoch uses every sample, whatever the scores."""
        return self._num_wanted >= self.num_samples or epoch < self._warmup_epochs or epoch >= self._tail_from

    def _class_floor(self) -> Units:
        """Smallest units of each sample: ``pi_min``, and a whole draw for each class together."""
        floor_N = np.full(self.num_samples, int(self.pi_min * ONE), dtype=np.uint32)
        if self._class_N is not None:
            size_C = np.bincount(self._class_N)
            np.maximum(floor_N, (-(-ONE // np.maximum(size_C, 1))).astype(np.uint32)[self._class_N], out=floor_N)
        return floor_N

    def _inclusion(self, scores: Scores) -> Units | None:
        """Inclusion units summing to a multiple of the global batch, or None where that takes every sample."""
        floor_N = np.where(scores.seen_N, self._floor_N, np.uint32(ONE))
        needed = -(-int(floor_N.sum(dtype=np.int64)) // (ONE * self.global_batch)) * self.global_batch
        num_drawn = max(self._num_wanted, needed)
        if num_drawn >= self.num_samples:
            return None
        return solve_units(_roots(scores), floor_N, num_drawn)


def _roots(scores: Scores) -> Floats:
    """sqrt of the capped scores, in (0, 1]; samples never seen get 1."""
    root_N = np.where(scores.seen_N, scores.score_N, np.float32(0))
    seen = scores.score_N[scores.seen_N]
    if len(seen):
        at = int(NOISE_CAP * (len(seen) - 1))
        seen.partition(at)
        np.minimum(root_N, seen[at], out=root_N)
    np.sqrt(root_N, out=root_N)
    largest = root_N.max()
    if largest > 0:
        root_N /= largest
    return np.maximum(root_N, np.float32(SMALLEST_ROOT), out=root_N)


def _as_classes(targets_N: Targets, num_samples: int) -> npt.NDArray[np.uint32]:
    """Classes renumbered 0 … C−1."""
    targets_N = np.asarray(targets_N)
    if targets_N.shape != (num_samples,):
        raise ConfigError.of(f"targets of shape ({num_samples},)", targets_N.shape, "give one class per sample")
    return np.unique(targets_N, return_inverse=True)[1].astype(np.uint32)

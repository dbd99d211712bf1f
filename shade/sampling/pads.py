"""Repeats important samples and cached samples: SHADE's PADS as published, with the released code's defects repaired.

**Biased by design.** Samples are drawn with replacement in proportion to importance, and no weight compensates, so
about 37 % of the data set is missing from an epoch and hard (or mislabelled) samples dominate. It reproduces the paper
and serves for comparison; `unbiased` reads less and keeps the expected gradient.

1. N draws with replacement, in proportion to the scores as they come.
2. *Aggressive*, if the mean change of validation accuracy over the last 3 epochs is positive: draws are listed by how
   often their sample was drawn, and the first quarter of the list replaces its last quarter. *Relaxed* otherwise.
3. Every draw of a cached sample appears ``replication_factor`` times; all are shuffled and the first N taken.

Legend: N data set and length of an epoch.
"""

from __future__ import annotations

import math

import numpy as np
from typing_extensions import override

from shade.errors import ConfigError
from shade.sampling.base import MODES, Draw, Purpose, Receipt, SamplingMode, Scores, Targets, Validation, generator
from shade.types import Bools, Order

VALIDATION_EPOCHS = 3
"""Number of changes of validation accuracy that are averaged."""
AGGRESSIVE_FRACTION = 0.25
"""Share of an aggressive epoch that is repeated."""


@MODES.register("pads")
class PadsMode(SamplingMode):
    """Priority-based adaptive data sampling; see the top of the file.

    Args:
        num_samples: N.
        global_batch: G.
        seed: Same on every rank.
        replication_factor: Times a draw of a cached sample appears, ≥ 1, in steps of 0.5.
        targets_N: Class of each sample, for the receipt's drift only.

    Raises:
        ConfigError: An argument out of its range.
    """

    draws_ahead = False
    uses_weights = False
    uses_scores = True
    default_policy = "shade"
    default_score = "rank"

    def __init__(
        self,
        num_samples: int,
        global_batch: int,
        seed: int,
        *,
        replication_factor: float = 1.0,
        targets_N: Targets | None = None,
    ) -> None:
        super().__init__(num_samples, global_batch, seed)
        twice = float(2 * replication_factor)
        if not (twice >= 2.0 and math.isfinite(twice) and twice.is_integer()):
            cure = "use -rep 1 for no replication"
            raise ConfigError.of("a replication factor of 1, 1.5, 2, …", replication_factor, cure)
        if targets_N is not None and np.shape(targets_N) != (num_samples,):
            raise ConfigError.of(f"targets of shape ({num_samples},)", np.shape(targets_N), "give one class per sample")
        self.replication_factor = replication_factor
        self._targets_N = targets_N

    @override
    def draw(
        self,
        epoch: int,
        scores: Scores | None,
        *,
        resident_N: Bools | None = None,
        validation: Validation | None = None,
    ) -> Draw:
        """All ranks must pass the same ``resident_N`` and ``validation``."""
        drawn = self._draw_weighted(epoch, scores)
        if is_aggressive(validation):
            drawn = self._second_helping(epoch, drawn)
        if resident_N is not None and self.replication_factor > 1:
            drawn = self._replicate(epoch, drawn, resident_N)
        generator(self.seed, epoch, Purpose.SHUFFLE).shuffle(drawn)
        # The release put hits first and cut misses off, so an epoch could end up all cached; here both are thinned
        # alike.
        order_K = drawn[: self.num_samples].copy()
        return Draw(epoch, order_K, None, self._receipt(order_K))

    def _draw_weighted(self, epoch: int, scores: Scores | None) -> Order:
        """Draws N samples with replacement; returns them ascending."""
        edge_N = np.ones(self.num_samples)
        if scores is not None and scores.seen_N.any():
            highest = scores.score_N[scores.seen_N].max()
            if highest > 0:
                # Never seen: the highest weight, so that it is drawn soon. The release started at 1, below everything
                # seen: seldom drawn, so seldom seen. Its smoothing by the last loss, which may be 0, is left out.
                np.copyto(edge_N, np.where(scores.seen_N, scores.score_N, highest))
        np.cumsum(edge_N, out=edge_N)
        point_N = generator(self.seed, epoch, Purpose.DRAW).random(self.num_samples)
        point_N.sort()  # ascending look-ups stay in the CPU's cache
        point_N *= edge_N[-1]
        # Binary search, so N may exceed the 2**24 of torch.multinomial.
        found = np.searchsorted(edge_N, point_N, side="right").astype(np.int32)
        return np.minimum(found, self.num_samples - 1, out=found)

    def _second_helping(self, epoch: int, drawn: Order) -> Order:
        """Replaces the least drawn quarter by the most drawn quarter."""
        times_N = np.bincount(drawn, minlength=self.num_samples).astype(np.int32)
        ranked_N = np.arange(self.num_samples, dtype=np.int32)
        # The release gave every rank the same head of its list, ties by index, which is class order: an epoch had as
        # many repeats of it as ranks. This is the same for any number of ranks.
        generator(self.seed, epoch, Purpose.TIES).shuffle(ranked_N)
        ranked_N = ranked_N[np.argsort(-times_N[ranked_N], kind="stable")]
        listed = np.repeat(ranked_N, times_N[ranked_N])
        helping = int(AGGRESSIVE_FRACTION * len(listed))
        return np.concatenate([listed[: len(listed) - helping], listed[:helping]])

    def _replicate(self, epoch: int, drawn: Order, resident_N: Bools) -> Order:
        """Appends the extra appearances of the draws that are cached."""
        cached = drawn[resident_N[drawn]]
        whole = int(self.replication_factor) - 1
        extra = [np.repeat(cached, whole)]
        if self.replication_factor % 1:
            some = generator(self.seed, epoch, Purpose.REPLICATE).permutation(len(cached))[: (len(cached) + 1) // 2]
            extra.append(cached[some])
        return np.concatenate([drawn, *extra])

    def _receipt(self, order_K: Order) -> Receipt:
        """Measures the draw; ``weight_sum_z`` is nan, because the mode claims nothing."""
        times_N = np.bincount(order_K, minlength=self.num_samples)
        drift = float("nan")
        if self._targets_N is not None:
            classes, class_N = np.unique(self._targets_N, return_inverse=True)
            got_C = np.bincount(class_N[order_K], minlength=len(classes)) / len(order_K)
            drift = float(np.abs(got_C - np.bincount(class_N) / self.num_samples).max())
        return Receipt(
            drawn=len(order_K),
            mean_inclusion=float(np.count_nonzero(times_N) / self.num_samples),
            weight_sum_z=float("nan"),
            effective_sample_size=len(order_K) ** 2 / float(times_N @ times_N),
            max_weight=1.0,
            class_drift=drift,
        )


def is_aggressive(validation: Validation | None) -> bool:
    """Returns whether validation accuracy rose, on average over the last 3 epochs; False while fewer than two are
    known."""
    if validation is None:
        return False
    changes = np.diff(np.asarray(validation.accuracies[-VALIDATION_EPOCHS - 1 :], dtype=np.float64))
    return bool(len(changes) and changes.mean() > 0)

"""Uses a share of the data set each epoch, the rest rarely, and weighs every gradient so that nothing is biased.

A sample with score s is drawn with probability ``pi = clip(c·sqrt(s), pi_min, 1)``, without replacement, and its
gradient counts ``1 / pi`` times. So the expected gradient sum of an epoch is that of the full data set, whatever the
scores are: stale, noisy or wrong scores cost variance, never bias. The first ``warmup_epochs`` and, if ``epochs`` is
known, the last eighth are full. An epoch has ``keep`` as many steps, each with ``1 / keep`` times the expected
gradient: a schedule that counts steps must take that into account.

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
from typing_extensions import override

from shade.errors import ConfigError
from shade.sampling.base import (
    MODES,
    ONE,
    Classes,
    Draw,
    Purpose,
    SamplingMode,
    Scores,
    Targets,
    Units,
    Validation,
    generator,
    is_large,
    parts,
    scale_for,
)
from shade.sampling.receipt import measure
from shade.sampling.uniform import full_epoch
from shade.types import Bools, Floats, Order

FULL_TAIL_FRACTION = 0.125
"""Share of the run, at its end, that uses every sample: InfoBatch's figure."""
NOISE_CAP = 0.95
"""Scores above this quantile of the seen ones count as the quantile."""
SMALLEST_ROOT = 1e-3
"""Smallest sqrt(score) as a share of the largest: keeps a loss of 0 from needing an infinite c."""


_BITS = ONE.bit_length() - 1


@MODES.register("unbiased")
class UnbiasedMode(SamplingMode):
    """Horvitz–Thompson sampling of an epoch; see the top of the file.

    Args:
        num_samples: N.
        global_batch: G.
        seed: The same on every rank.
        keep: Share of the data set an epoch uses, in (0, 1]. 1.0 is a plain shuffle without weights.
        pi_min: Smallest inclusion probability, in (0, keep]; the largest weight is its inverse.
        warmup_epochs: Full epochs at the start, ≥ 0. Two: epoch 1 is drawn as epoch 0 begins, before any loss is known.
        epochs: Length of the run, if known; its last eighth is full then.
        targets_N: Class of each sample: the draw is stratified, and each class with a member keeps at least
            ``max(1, ⌊pi_min·n⌋)`` of its n.
        draws_ahead: Whether the next epoch is drawn as this one begins: scores one epoch older, cache planned exactly.

    Raises:
        ConfigError: An argument out of its range.
    """

    default_policy = "plan"
    default_score = "target-grad"

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
        # The last epochs are full, so that training ends on the exact objective.
        self._tail_from = math.inf if epochs is None else epochs - math.ceil(epochs * FULL_TAIL_FRACTION)
        self._class_N = None if targets_N is None else _as_classes(targets_N, num_samples)
        self._num_wanted = budget(num_samples, global_batch, keep)
        self._floor_C = self._class_floor()

    @override
    def draw(
        self,
        epoch: int,
        scores: Scores | None,
        *,
        resident_N: Bools | None = None,
        validation: Validation | None = None,
    ) -> Draw:
        """Draws more than K if samples never seen fill the budget."""
        del resident_N, validation
        num_drawn = self.num_samples
        if scores is not None and not self._is_full(epoch):
            num_drawn = self._num_with_floor(self._sizes(scores.seen_N))
        if scores is None or num_drawn >= self.num_samples:
            return full_epoch(self.num_samples, self.seed, epoch, has_classes=self._class_N is not None)
        drawn_by = self._draw_large if is_large(self.num_samples) else self._draw_small
        order_K, weight_N = drawn_by(epoch, scores, num_drawn)
        return Draw(epoch, order_K, weight_N, measure(order_K, weight_N, self._class_N))

    def _draw_small(self, epoch: int, scores: Scores, num_drawn: int) -> tuple[Order, Floats]:
        """Draws so many samples by numpy; returns them in random order, and the weights."""
        floor_N = self._floor_C[0] if self._class_N is None else self._floor_C[self._class_N]
        units_N = solve_units(_roots(scores), np.where(scores.seen_N, floor_N, np.uint32(ONE)), num_drawn)
        order_K = draw_systematic(units_N, self.seed, epoch, self._class_N)
        generator(self.seed, epoch, Purpose.SHUFFLE).shuffle(order_K)
        return order_K, np.divide(float(ONE), units_N, out=np.empty(len(units_N), np.float32), casting="same_kind")

    def _draw_large(self, epoch: int, scores: Scores, num_drawn: int) -> tuple[Order, Floats]:
        """Draws so many samples by `large`; returns them in random order, and the weights."""
        from shade.sampling import large

        num_seen = np.count_nonzero(scores.seen_N)
        cap = large.smallest(scores.score_N, scores.seen_N, int(NOISE_CAP * (num_seen - 1))) if num_seen else 0.0
        inclusion = large.solve(scores, cap, SMALLEST_ROOT, self._floor_C, self._class_N, num_drawn)
        purposes = (Purpose.ARRANGE, Purpose.START, Purpose.TIES, Purpose.SHUFFLE)
        streams = {purpose.name.lower(): generator(self.seed, epoch, purpose) for purpose in purposes}
        return large.draw(inclusion, streams), inclusion.weights()

    @override
    def num_drawn(self, epoch: int) -> int:
        return self.num_samples if self._is_full(epoch) else self._num_with_floor(self._sizes())

    def _is_full(self, epoch: int) -> bool:
        """Returns whether this epoch uses every sample, whatever the scores."""
        return self._num_wanted >= self.num_samples or epoch < self._warmup_epochs or epoch >= self._tail_from

    def _class_floor(self) -> Units:
        """Returns the smallest units of a sample by class: ``pi_min``, and a whole draw for each class together."""
        size_C = self._sizes()
        floor_C = np.full(len(size_C), int(self.pi_min * ONE), dtype=np.uint32)
        return floor_C if self._class_N is None else np.maximum(floor_C, (-(-ONE // size_C)).astype(np.uint32))

    def _sizes(self, counted_N: Bools | None = None) -> npt.NDArray[np.int64]:
        """Returns how many samples of each class are counted (None: all); one class if there are no targets."""
        if self._class_N is None:
            return np.array([self.num_samples if counted_N is None else np.count_nonzero(counted_N)])
        size_C = np.zeros(int(self._class_N.max()) + 1, dtype=np.int64)
        for part in parts(self.num_samples):
            class_B = self._class_N[part] if counted_N is None else self._class_N[part][counted_N[part]]
            size_C += np.bincount(class_B, minlength=len(size_C))
        return size_C

    def _num_with_floor(self, seen_C: npt.NDArray[np.int64]) -> int:
        """Returns K: the budget, or what the smallest units of all samples need, at most N; ``seen_C`` says how many
        samples of each class have a score, and the others are certain."""
        units = int(self._floor_C.astype(np.int64) @ seen_C) + (self.num_samples - int(seen_C.sum())) * ONE
        needed = -(-units // (ONE * self.global_batch)) * self.global_batch
        return min(max(self._num_wanted, needed), self.num_samples)


def _roots(scores: Scores) -> Floats:
    """Returns sqrt of the capped scores, in (0, 1]; samples never seen get 1."""
    root_N = np.where(scores.seen_N, scores.score_N, np.float32(0))
    seen = scores.score_N[scores.seen_N]
    if len(seen):
        # A few mislabelled samples with huge losses would take the budget of all others.
        at = int(NOISE_CAP * (len(seen) - 1))
        seen.partition(at)
        np.minimum(root_N, seen[at], out=root_N)
    # Variance is least for pi in proportion to the gradient's norm, of which the loss is a heavy-tailed stand-in;
    # the root flattens it.
    np.sqrt(root_N, out=root_N)
    largest = root_N.max()
    if largest > 0:
        root_N /= largest
    return np.maximum(root_N, np.float32(SMALLEST_ROOT), out=root_N)


def _as_classes(targets_N: Targets, num_samples: int) -> Classes:
    """Renumbers classes 0 … C−1, in 16 bits if they fit."""
    targets_N = np.asarray(targets_N)
    if targets_N.shape != (num_samples,):
        raise ConfigError.of(f"targets of shape ({num_samples},)", targets_N.shape, "give one class per sample")
    lowest, span = int(targets_N.min()), int(targets_N.max()) - int(targets_N.min()) + 1
    if span > max(num_samples, 1 << 16):
        found_N = np.unique(targets_N, return_inverse=True)[1]
        return found_N.astype(np.uint16 if found_N.max() < 1 << 16 else np.uint32)
    is_used_V = np.zeros(span, dtype=bool)
    for part in parts(num_samples):
        is_used_V[targets_N[part].astype(np.int64) - lowest] = True
    number_V = np.cumsum(is_used_V) - 1
    class_N: Classes = np.empty(num_samples, dtype=np.uint16 if number_V[-1] < 1 << 16 else np.uint32)
    for part in parts(num_samples):
        class_N[part] = number_V[targets_N[part].astype(np.int64) - lowest]
    return class_N


def budget(num_samples: int, global_batch: int, keep: float) -> int:
    """Returns how many samples an epoch draws: the multiple of the global batch nearest to ``keep * N``, at least one
    batch; N if there is no such multiple below N."""
    if keep >= 1.0 or num_samples <= global_batch:
        return num_samples
    steps = max(1, round(keep * num_samples / global_batch))
    return min(steps, num_samples // global_batch) * global_batch


def solve_units(root_N: Floats, floor_N: Units, num_drawn: int) -> Units:
    """Solves ``pi_i = clip(c * root_i, floor_i, 1)`` for the c that makes the sum ``num_drawn``.

    The sum is piecewise linear and growing in c, so Newton's step is exact within a piece; a bracket keeps it from
    cycling between pieces. What rounding leaves over is handed out a unit at a time. Invariant: ``floor_N <= units_N <=
    ONE`` and ``units_N.sum() == num_drawn * ONE``.

    Args:
        root_N: float32 (N,), > 0: the wanted proportions.
        floor_N: Smallest units of each; ONE forces a sample in.
        num_drawn: K; ``floor_N.sum() <= K * ONE <= N * ONE``.

    Returns:
        uint32 (N,), summing to exactly ``K * ONE``.
    """
    # Whole numbers of 2**-30: a float sum of a million terms is never exactly K, and a draw from it is sometimes one
    # sample short. So 1 / pi belongs to the very probability that was used; the proportions are off by 1e-9.
    units_N = _rounded_units(root_N, floor_N, float(num_drawn) * ONE)
    _hand_out(units_N, floor_N, num_drawn * ONE - int(units_N.sum(dtype=np.int64)))
    return units_N


def _rounded_units(root_N: Floats, floor_N: Units, goal: float) -> Units:
    """Returns the units of each sample, rounded, so that they sum to the goal but for the rounding."""
    largest = ONE / float(root_N.min())
    wanted_N = np.empty(len(root_N), dtype=np.float64)

    def probe(scale: float) -> tuple[float, float]:
        np.multiply(root_N, scale, out=wanted_N, dtype=np.float64)
        free_N = (wanted_N > floor_N) & (wanted_N < ONE)
        slope = float(root_N.sum(dtype=np.float64, where=free_N))
        np.clip(wanted_N, floor_N, ONE, out=wanted_N)
        return float(wanted_N.sum()), slope

    scale_for(goal, probe, min(goal / float(root_N.sum(dtype=np.float64)), largest), largest)
    np.rint(wanted_N, out=wanted_N)
    return wanted_N.astype(np.uint32)


def _hand_out(units_N: Units, floor_N: Units, rest: int) -> None:
    """Adds ``rest`` units (or takes them away) where there is room, as evenly as possible, in place."""
    while rest:
        room_N = ONE - units_N if rest > 0 else units_N - floor_N
        movable = np.flatnonzero(room_N)
        share, extra = divmod(abs(rest), len(movable))
        if share == 0:
            movable = movable[:extra]
        give = np.minimum(room_N[movable], max(share, 1)).astype(np.uint32)
        if rest > 0:
            units_N[movable] += give
            rest -= int(give.sum(dtype=np.int64))
        else:
            units_N[movable] -= give
            rest += int(give.sum(dtype=np.int64))


def draw_systematic(units_N: Units, seed: int, epoch: int, class_N: Classes | None = None) -> Order:
    """Draws a fixed number of samples without replacement, each with its own probability, from one random number.

    Args:
        units_N: Inclusion probabilities as `solve_units` gives them.
        seed: Seed of the run.
        epoch: ≥ 0.
        class_N: Classes as 0 … C−1, to draw stratified; or None.

    Returns:
        int32 (K,), distinct, in the order of the line: shuffle before use.
    """
    line_N: Order = np.arange(len(units_N), dtype=np.int32)
    # A new order each epoch: neighbours on the line are never drawn independently, and no pair is to be favoured.
    generator(seed, epoch, Purpose.ARRANGE).shuffle(line_N)
    if class_N is not None:
        # With classes together, each is marked ⌊its length⌋ or ⌈its length⌉ times: a stratified draw for free.
        line_N = _classes_together(line_N, class_N, seed, epoch)
    # Samples lie end to end, each as long as its probability; marks lie at start, start + 1, … No sample is longer
    # than 1, so none is marked twice, and the line is K long, so K are marked.
    start = int(generator(seed, epoch, Purpose.START).integers(ONE))
    marks_N = np.cumsum(units_N[line_N], dtype=np.int64)
    # Counts the marks before the end of each sample without a float.
    marks_N += ONE - 1 - start
    marks_N >>= _BITS  # marks strictly before the end of each sample
    marked_N = np.empty(len(marks_N), dtype=bool)
    marked_N[0] = marks_N[0] > 0
    np.greater(marks_N[1:], marks_N[:-1], out=marked_N[1:])
    return line_N[marked_N]


def _classes_together(line_N: Order, class_N: Classes, seed: int, epoch: int) -> Order:
    """Sorts by class, stably, the classes in a random order of their own."""
    num_classes = int(class_N.max()) + 1
    place_C = generator(seed, epoch, Purpose.TIES).permutation(num_classes)
    narrow = np.uint16 if num_classes <= 2**16 else np.uint32  # numpy sorts 16 bits by radix: five times faster
    position_N = place_C.astype(narrow)[class_N[line_N]]
    return line_N[np.argsort(position_N, kind="stable")]

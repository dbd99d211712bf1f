"""Finds samples worth a look by the course of their losses while the model learned the others.

A sample whose label is wrong keeps a large loss while the rest of its class is learned, so the probability
``exp(-loss)`` that the model gave its label, averaged over the run, stays low: its *confidence*. *Suspicion* compares
it with the class: 0 at the median of the class, 1 where the model gave the label no probability at all. This is no
verdict: a rare view, a hard class or a broken file look the same. The flags assume cross-entropy.

References:
    Swayamdipta et al., "Dataset Cartography", EMNLP 2020, for confidence; Northcutt et al., "Confident Learning", JAIR
    2021, for judging by class.

Legend: N data set · C classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shade.report.style import percent
from shade.types import Bools, Floats, Indices

EVEN_CHANCE = 0.5
"""Probability of its label from which on a sample counts as learned."""
SUSPICIOUS = 0.5
"""Suspicion from which on a label counts as likely wrong: half the confidence that is usual in the class."""
FEWEST_USES = 2
"""Least number of uses after which a sample is judged: one use may have met an unlucky crop."""
SETTLED_AFTER = 3
"""Number of epochs from which on the first one is left out."""

PRECISION = (
    f"Precision: with a tenth of the labels wrong (1,437 digits, 6 epochs), {percent(0.8)} or more of the first "
    f"{percent(0.05)} of the list were wrong labels. With fewer wrong labels, more suspicions are false: a rare but "
    "right sample looks the same. Look at each before you remove or relabel it."
)

CSV_FILE, SHEET_FILE = "quality.csv", "quality.png"
"""In the run directory: every sample, and the most suspicious to look at."""

Counts = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Verdicts:
    """Statistics of each sample's losses; arrays (N,). NaN where a sample was never used."""

    uses_N: Counts
    """Epochs in which it was used, the first left out where the averages leave it out."""
    first_loss_N: Floats
    last_loss_N: Floats
    mean_loss_N: Floats
    confidence_N: Floats
    """Mean probability that the model gave its label."""
    variability_N: Floats
    """Standard deviation of that: large for samples the model changed its mind about."""
    best_N: Floats
    """The largest probability it ever gave its label."""
    forgotten_N: Counts
    """Times that a learned sample was forgotten."""
    usual_N: Floats
    """Median confidence of its class."""
    suspicion_N: Floats
    """``1 - confidence / usual``, in [0, 1]; 0 where there is nothing to say."""

    @property
    def mislabelled_N(self) -> Bools:
        """Returns which samples are likely mislabelled."""
        return self._known_N & (self.suspicion_N >= SUSPICIOUS)

    @property
    def never_learned_N(self) -> Bools:
        """Returns which samples never gave their label an even chance, though their class was learned."""
        return self._known_N & (self.best_N < EVEN_CHANCE)

    @property
    def by_suspicion(self) -> Indices:
        """Returns sample indices, the most suspicious first; among equals the larger mean loss."""
        return np.lexsort((-np.nan_to_num(self.mean_loss_N), -self.suspicion_N)).astype(np.int64)

    @property
    def _known_N(self) -> Bools:
        """Returns which samples were used often enough, in a class that was learned."""
        return (self.uses_N >= FEWEST_USES) & (self.usual_N >= EVEN_CHANCE)


def judge(losses: Iterable[Floats], num_epochs: int, target_N: npt.ArrayLike | None = None) -> Verdicts:
    """Judges every sample, in one pass over the epochs.

    Each epoch is float32 (N,), NaN where a sample was not used. Without `target_N`, the classes, all are one class.
    """
    skipped = int(num_epochs >= SETTLED_AFTER)
    tally: _Tally | None = None
    for number, loss_N in enumerate(losses):
        tally = tally or _Tally(len(loss_N))
        tally.add(loss_N, counts=number >= skipped)
    assert tally is not None, "a trajectory has an epoch"
    return tally.verdicts(target_N)


class _Tally:
    """Keeps running sums over the epochs."""

    def __init__(self, num_samples: int) -> None:
        self._uses_N, self._judged_N, self._forgotten_N = (np.zeros(num_samples, np.int32) for _ in range(3))
        self._first_N, self._last_N, self._best_N = (np.full(num_samples, np.nan, np.float32) for _ in range(3))
        self._loss_N, self._sum_N, self._square_N = (np.zeros(num_samples, np.float64) for _ in range(3))
        self._learned_N = np.zeros(num_samples, dtype=bool)

    def add(self, loss_N: Floats, *, counts: bool) -> None:
        """Adds an epoch's losses; ``counts`` says whether they count towards the confidence."""
        used = np.flatnonzero(~np.isnan(loss_N))
        loss = loss_N[used].astype(np.float64)
        belief = np.exp(-np.maximum(loss, 0.0))
        new = used[self._uses_N[used] == 0]
        self._first_N[new] = loss_N[new]
        self._last_N[used] = loss_N[used]
        self._uses_N[used] += 1
        self._loss_N[used] += loss
        learned = belief >= EVEN_CHANCE
        self._forgotten_N[used] += self._learned_N[used] & ~learned
        self._learned_N[used] = learned
        if counts:
            self._judged_N[used] += 1
            self._sum_N[used] += belief
            self._square_N[used] += belief**2
            self._best_N[used] = np.fmax(self._best_N[used], belief)

    def verdicts(self, target_N: npt.ArrayLike | None) -> Verdicts:
        """Returns the verdicts over the epochs that were added."""
        mean_loss_N = _ratio(self._loss_N, self._uses_N)
        confidence_N = _ratio(self._sum_N, self._judged_N)
        variance_N = _ratio(self._square_N, self._judged_N) - confidence_N**2
        usual_N = _medians(confidence_N, target_N)
        judged_N = (self._judged_N > 0) & (usual_N > 0)
        suspicion_N = np.zeros(len(usual_N))
        suspicion_N[judged_N] = np.clip(1.0 - confidence_N[judged_N] / usual_N[judged_N], 0.0, 1.0)
        return Verdicts(
            self._judged_N,
            self._first_N,
            self._last_N,
            mean_loss_N.astype(np.float32),
            confidence_N.astype(np.float32),
            np.sqrt(np.maximum(variance_N, 0.0)).astype(np.float32),
            self._best_N,
            self._forgotten_N,
            usual_N.astype(np.float32),
            suspicion_N.astype(np.float32),
        )


def _ratio(sum_N: npt.NDArray[np.float64], count_N: Counts) -> npt.NDArray[np.float64]:
    """Returns means; NaN where there is nothing to average."""
    ratio_N = np.full(len(sum_N), np.nan)
    np.divide(sum_N, count_N, out=ratio_N, where=count_N > 0)
    return ratio_N


def _medians(confidence_N: npt.NDArray[np.float64], target_N: npt.ArrayLike | None) -> npt.NDArray[np.float64]:
    """Returns (N,) the median confidence of each sample's class; 0 in a class without a known sample."""
    class_N = np.zeros(len(confidence_N), np.int64) if target_N is None else np.unique(target_N, return_inverse=True)[1]
    median_C = np.zeros(int(class_N.max()) + 1)
    order = np.argsort(class_N, kind="stable")
    ends = np.cumsum(np.bincount(class_N))
    for number, members in enumerate(np.split(order, ends[:-1])):
        known = confidence_N[members]
        known = known[~np.isnan(known)]
        if len(known):
            median_C[number] = np.median(known)
    return median_C[class_N]

"""k-means of numbers on a line, without sorting them.

Numbers are counted by the upper half of their float32 bits, which sorts them into at most 65 536 bins no wider than
2⁻⁷ of what is in them. Lloyd's iteration then moves the borders between clusters over the bins: sums of the numbers
themselves, so that a centre is the mean of its cluster. Borders lie between bins; that is all that is given up.
`benchmarks/bench_codecs.py` has it beside scikit-learn, on the same numbers.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

_ROUNDS: Final = 30
_BINS: Final = 2**16

Sums: TypeAlias = npt.NDArray[np.float64]


def cluster(
    values_N: npt.NDArray[np.float32], num_clusters: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Clusters numbers.

    Args:
        values_N: Finite; at least one.
        num_clusters: At most, 1 … 255.

    Returns:
        ``(centres_C, labels_N)``: centres ascending, and for each number the index of its own.
    """
    keys_N = _keys(values_N)
    counts = np.bincount(keys_N, minlength=_BINS)
    (used,) = np.nonzero(counts)
    weights = counts[used].astype(np.float64)
    sums = np.bincount(keys_N, weights=values_N, minlength=_BINS)[used]
    means = sums / weights
    total = np.concatenate([[0.0], np.cumsum(weights)])
    mass = np.concatenate([[0.0], np.cumsum(sums)])
    centres = _split(means, weights, num_clusters)
    for _ in range(_ROUNDS):
        edges = np.searchsorted(means, (centres[1:] + centres[:-1]) / 2)
        cuts = np.concatenate([[0], edges, [len(used)]])
        held = np.diff(total[cuts])
        inside = held > 0
        moved = np.where(inside, np.diff(mass[cuts]) / np.where(inside, held, 1.0), centres)
        if np.array_equal(moved, centres):
            break
        centres = moved
    stored = np.unique(centres.astype(np.float32))
    edges = np.searchsorted(means, (stored[1:].astype(np.float64) + stored[:-1]) / 2)
    labels = np.zeros(_BINS, np.uint8)
    labels[used] = np.searchsorted(edges, np.arange(len(used)), side="right")
    return stored, labels[keys_N]


def _split(means: Sums, weights: Sums, num_clusters: int) -> Sums:
    """Centres to begin with: again and again the cluster with the greatest error is split at its mean."""
    total, mass, squares = (np.concatenate([[0.0], np.cumsum(weights * means**power)]) for power in (0, 1, 2))

    def error(first: int, last: int) -> float:
        count = total[last] - total[first]
        return float(squares[last] - squares[first] - (mass[last] - mass[first]) ** 2 / count)

    clusters = [(error(0, len(means)), 0, len(means))]
    while len(clusters) < num_clusters:
        worst = max(
            range(len(clusters)), key=lambda number: (clusters[number][2] - clusters[number][1] > 1, clusters[number])
        )
        _, first, last = clusters.pop(worst)
        if last - first == 1:
            clusters.append((0.0, first, last))
            break
        mean = (mass[last] - mass[first]) / (total[last] - total[first])
        middle = min(max(first + int(np.searchsorted(means[first:last], mean)), first + 1), last - 1)
        clusters += [(error(first, middle), first, middle), (error(middle, last), middle, last)]
    return np.array(sorted((mass[last] - mass[first]) / (total[last] - total[first]) for _, first, last in clusters))


def _keys(values_N: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of their bits, as numbers that ascend with them."""
    high_N = (values_N.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(high_N >= 2**15, ~high_N, high_N | np.uint16(2**15))

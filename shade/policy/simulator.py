"""Replays a recorded trace through the very policies that run in the cache, and counts their origin reads.

No store and no time: a hit is an access whose sample was resident; every other access is an origin read. The first
epochs fill the cache: leave them out with ``skip_epochs``. Invariant: a policy's verdicts on a trace are the same here
as in a run of that trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shade.errors import ConfigError
from shade.policy.base import EMPTY, POLICIES, EpochPlan
from shade.policy.trace import Trace

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SimulationResult:
    """What one policy did with one trace; arrays hold one number an epoch."""

    policy: str
    capacity_bytes: int
    num_samples: int
    accesses: Counts
    hits: Counts
    origin_bytes: Counts
    """Bytes of the accesses that were not hits."""
    peak_resident_bytes: Counts
    """Largest number of bytes resident after any batch."""

    @property
    def origin_reads(self) -> Counts:
        """Returns the accesses that were not hits."""
        return self.accesses - self.hits

    def hit_ratio(self, skip_epochs: int = 0) -> float:
        """Returns hits / accesses over the epochs from ``skip_epochs`` on; nan without any."""
        accesses = int(self.accesses[skip_epochs:].sum())
        return int(self.hits[skip_epochs:].sum()) / accesses if accesses else float("nan")

    def miss_ratio(self, skip_epochs: int = 0) -> float:
        """Returns 1 - `hit_ratio`."""
        return 1.0 - self.hit_ratio(skip_epochs)

    def origin_reads_per_sample(self, skip_epochs: int = 0) -> float:
        """Returns origin reads an epoch, divided by N: 1 is a run without a cache that uses every sample once."""
        reads = self.origin_reads[skip_epochs:]
        return float(reads.mean()) / self.num_samples if len(reads) else float("nan")


def simulate(trace: Trace, policy_name: str = "plan", capacity_bytes: int = 0) -> SimulationResult:
    """Replays a trace against an empty cache, and returns counts by epoch. The policy learns that no epoch follows the
    last.

    Raises UnknownNameError for an unknown policy, and ConfigError for a negative capacity.
    """
    policy_class = POLICIES.get(policy_name)
    policy = policy_class(trace.size_bytes_N, capacity_bytes)
    hits, origin_bytes, peak = (np.zeros(trace.num_epochs, dtype=np.int64) for _ in range(3))
    for epoch, order_K in enumerate(trace.orders):
        following = (*trace.orders[epoch + 1 :], EMPTY)
        policy.begin_epoch(
            EpochPlan(
                epoch,
                order_K,
                following[0] if policy_class.needs_next_order else None,
                trace.score_of(epoch),
                following[1:-1] if policy_class.offline else (),
            )
        )
        peak[epoch] = policy.used_bytes
        for start in range(0, len(order_K), trace.global_batch):
            index_B = order_K[start : start + trace.global_batch]
            hit_B = policy.access_many(index_B).hit_B
            hits[epoch] += np.count_nonzero(hit_B)
            origin_bytes[epoch] += trace.size_bytes_N[index_B[~hit_B]].sum()
            peak[epoch] = max(peak[epoch], policy.used_bytes)
    accesses = np.array([len(order_K) for order_K in trace.orders], dtype=np.int64)
    return SimulationResult(policy_name, capacity_bytes, trace.num_samples, accesses, hits, origin_bytes, peak)


@dataclass(frozen=True)
class MissRatioCurves:
    """Every policy at every capacity."""

    fractions: tuple[float, ...]
    """Capacity / bytes of the data set."""
    skip_epochs: int
    """Epochs at the start that averages leave out."""
    results: dict[str, tuple[SimulationResult, ...]] = field(default_factory=dict)
    """Policy → one result a fraction."""


def miss_ratio_curves(
    trace: Trace, policies: Sequence[str], fractions: Sequence[float], *, skip_epochs: int = 1
) -> MissRatioCurves:
    """Simulates each policy at each capacity, given as a fraction of the data set's bytes; the first ``skip_epochs``
    are warm-up. Raises ConfigError if no epoch is left after it, or as `simulate`."""
    if not 0 <= skip_epochs < trace.num_epochs:
        expected = f"0 ≤ skip_epochs < {trace.num_epochs}, the epochs in the trace"
        raise ConfigError.of(expected, skip_epochs, "skip fewer or record more")
    capacities = [round(fraction * trace.data_set_bytes) for fraction in fractions]
    results = {name: tuple(simulate(trace, name, capacity) for capacity in capacities) for name in policies}
    return MissRatioCurves(tuple(fractions), skip_epochs, results)

"""Memory and disk planned together: the origin's bytes of one cache of both sizes, and memory's hits of one alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from shade.policy.base import EMPTY, EpochPlan
from shade.policy.plan import PlanPolicy
from shade.policy.simulator import simulate
from shade.policy.trace import Trace
from tests.unit.policy.test_plan import inclusion_trace

N = 1000


@dataclass
class Served:
    """Bytes of the accesses by where they came from, over all epochs but the first two."""

    memory: int = 0
    disk: int = 0
    origin: int = 0


def walk(trace: Trace, memory_bytes: int, disk_bytes: int, *, planned_together: bool = True) -> Served:
    """Replays a trace through the two plans as `CachePlanner` makes them."""
    sizes = trace.size_bytes_N
    memory, disk = PlanPolicy(sizes, memory_bytes), PlanPolicy(sizes, disk_bytes)
    served = Served()
    for epoch, order_K in enumerate(trace.orders):
        following = trace.orders[epoch + 1] if epoch + 1 < trace.num_epochs else EMPTY
        memory.begin_epoch(EpochPlan(epoch, order_K, following, has_tier_below=planned_together))
        held_N = memory.resident_at_end() if planned_together else None
        disk.begin_epoch(EpochPlan(epoch, order_K, following, held_above_N=held_N))
        for start in range(0, len(order_K), trace.global_batch):
            index_B = order_K[start : start + trace.global_batch]
            in_memory_B, on_disk_B = (policy.access_many(index_B).hit_B for policy in (memory, disk))
            assert memory.used_bytes <= memory_bytes
            assert disk.used_bytes <= disk_bytes
            if epoch >= 2:
                size_B = sizes[index_B]
                served.memory += int(size_B[in_memory_B].sum())
                served.disk += int(size_B[on_disk_B & ~in_memory_B].sum())
                served.origin += int(size_B[~on_disk_B & ~in_memory_B].sum())
        if held_N is not None:
            assert np.array_equal(memory.resident_N, held_N)
    return served


def sizes_of(kind: str) -> np.ndarray:
    if kind == "equal":
        return np.full(N, 10)
    return np.random.default_rng(5).lognormal(9, 0.6, N).astype(np.int64) + 1


@pytest.mark.parametrize(("kind", "rest"), [("equal", 0.0), ("mixed", 0.0005)])  # room in which no sample fits
@pytest.mark.parametrize(("keep", "excess"), [(1.0, 0.0), (0.7, 0.005), (0.5, 0.005)])
@pytest.mark.parametrize(("memory", "disk"), [(0.1, 0.2), (0.2, 0.4), (0.05, 0.6)])
def test_two_tiers_read_what_one_cache_of_both_sizes_reads(
    kind: str, rest: float, keep: float, excess: float, memory: float, disk: float
) -> None:
    trace = inclusion_trace(N, keep, 10, 3, sizes_of(kind))
    memory_bytes, disk_bytes = int(memory * trace.data_set_bytes), int(disk * trace.data_set_bytes)
    served = walk(trace, memory_bytes, disk_bytes)
    used = served.memory + served.disk + served.origin
    one, alone = (
        int(simulate(trace, "plan", capacity).origin_bytes[2:].sum())
        for capacity in (memory_bytes + disk_bytes, memory_bytes)
    )
    assert served.origin <= one + (excess + rest) * used
    assert abs(served.memory - (used - alone)) <= rest * used  # the disk below takes nothing from memory
    assert walk(trace, memory_bytes, disk_bytes, planned_together=False).origin > served.origin


def test_what_memory_holds_fills_the_room_that_is_left() -> None:
    trace = inclusion_trace(N, 1.0, 4, 3, sizes_of("equal"))
    memory, disk = PlanPolicy(trace.size_bytes_N, 2000), PlanPolicy(trace.size_bytes_N, 10_000)
    for epoch in range(2):
        plan = EpochPlan(epoch, trace.orders[epoch], trace.orders[epoch + 1])
        memory.begin_epoch(replace(plan, has_tier_below=True))
        disk.begin_epoch(replace(plan, held_above_N=memory.resident_at_end()))
        memory.access_many(trace.orders[epoch])
        disk.access_many(trace.orders[epoch])
    assert disk.resident_N.all()  # so the next job, whose memory is empty, reads nothing from the origin

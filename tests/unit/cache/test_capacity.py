"""What is lent and what other jobs may keep both bound the cache; the smaller of the two is in force."""

from __future__ import annotations

import pickle

from shade.cache.capacity import Capacity
from shade.cache.residency_map import ResidencyMap


def test_the_smaller_bound_is_in_force() -> None:
    residency = ResidencyMap(4)
    capacity = Capacity(100, residency)
    assert residency.capacity_bytes == 100
    capacity.share(60)
    assert (capacity.total_bytes, capacity.quota_bytes, residency.capacity_bytes) == (100, 60, 60)
    capacity.allow(40)
    assert (capacity.allowed_bytes, residency.capacity_bytes) == (40, 40)
    capacity.share(30)
    assert residency.capacity_bytes == 30
    capacity.share(100)
    capacity.allow(1000)  # no more than the total
    assert (capacity.allowed_bytes, residency.capacity_bytes) == (100, 100)
    capacity.allow(-1)
    assert residency.capacity_bytes == 0


def test_a_copy_in_another_process_has_the_same_numbers() -> None:
    capacity = Capacity(100, ResidencyMap(4))
    capacity.share(60)
    copy = pickle.loads(pickle.dumps(capacity))
    assert (copy.total_bytes, copy.allowed_bytes, copy.quota_bytes) == (100, 100, 60)

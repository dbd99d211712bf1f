"""The best length of a batch: what the formula says of itself, and what is measured of writes that obey it."""

from __future__ import annotations

import math
import random

import pytest

from shade.checkpoint._pacing.batching import Batching, best_batch_bytes

MB = 1_000_000


def unhidden_seconds(batch: float, num_bytes: float, latency: float, chunk: float, chunk_seconds: float) -> float:
    """What the formula minimises."""
    return num_bytes / batch * latency + batch / chunk * chunk_seconds


@pytest.mark.parametrize("latency", [0.0001, 0.014])
@pytest.mark.parametrize("chunk_seconds", [0.0002, 0.05])
def test_no_other_length_ends_sooner(latency: float, chunk_seconds: float) -> None:
    num_bytes, chunk = 1500 * MB, 4 * MB
    best = best_batch_bytes(num_bytes, latency, chunk, chunk_seconds)
    least = unhidden_seconds(best, num_bytes, latency, chunk, chunk_seconds)
    for batch in (chunk * 1.1**power for power in range(63)):
        assert least <= unhidden_seconds(batch, num_bytes, latency, chunk, chunk_seconds) * (1 + 1e-9)


def test_the_figures_that_are_published_come_out() -> None:
    """AsymCheck's code: 409.6 MB, 14.17 ms a write, chunks of 0.8 MB every 1.0859 ms give 65.4 MB."""
    assert best_batch_bytes(409_600_000, 0.01417, 800_000, 0.0010859) / MB == pytest.approx(65.4, abs=0.05)


def test_it_is_never_less_than_a_chunk_nor_more_than_there_is() -> None:
    assert best_batch_bytes(100 * MB, 0.0, 4 * MB, 0.001) == 4 * MB
    assert best_batch_bytes(100 * MB, 9.0, 4 * MB, 0.001) == 100 * MB
    assert best_batch_bytes(100 * MB, 0.001, 4 * MB, 0.0) == 100 * MB
    assert best_batch_bytes(MB, 0.001, 4 * MB, 0.001) == 4 * MB


def test_latency_and_pace_are_found_among_noise() -> None:
    """A disk of 1 GB/s and 2 ms a write, chunks every 4 ms: √(1000 · 0.002 · 4 / 0.004) MB are 44.7 MB."""
    dice, batching = random.Random(0), Batching()
    lengths = []
    for _ in range(40):
        lengths.append(batching.batch_bytes(1000 * MB, 4 * MB))
        for _ in range(lengths[-1] // (4 * MB)):
            batching.made(0.004 * dice.uniform(0.9, 1.1))
        batching.wrote(lengths[-1], (0.002 + lengths[-1] / 1e9) * dice.uniform(0.98, 1.02))
    assert lengths[:4] == [4 * MB, 8 * MB, 16 * MB, 32 * MB], "first they are different on purpose"
    assert batching.latency_seconds == pytest.approx(0.002, rel=0.5)
    assert batching.batch_bytes(1000 * MB, 4 * MB) / MB == pytest.approx(math.sqrt(2000), rel=0.3)


def test_writes_of_one_length_tell_no_latency_so_others_are_tried() -> None:
    batching = Batching()
    for _ in range(200):
        batching.made(0.001)
        batching.wrote(4 * MB, 0.01)
    assert {batching.batch_bytes(100 * MB, 4 * MB) for _ in range(2)} == {4 * MB}
    batching.wrote(4 * MB, 0.01)
    assert batching.batch_bytes(100 * MB, 4 * MB) == 8 * MB

"""Pace: finds what a link can carry, does not stay above it, and follows it when it changes."""

from __future__ import annotations

import heapq
import random

import pytest

from shade.store.origin_pace import FIRST, Pace

BYTES = 40_000


class Link:
    """Storage with a latency and a rate, in virtual time; always something left to read."""

    def __init__(self, latency: float, reads_per_second: float, noise: float = 0.0) -> None:
        self.latency, self.reads_per_second, self.noise = latency, reads_per_second, noise
        self.now = self.free = 0.0
        self.under_way: list[tuple[float, float]] = []
        self.random = random.Random(1)

    def run(self, pace: Pace, num_reads: int) -> float:
        """Reads so many; returns reads a second."""
        began = self.now
        for _ in range(num_reads):
            while len(self.under_way) < pace.limit:
                self.free = max(self.free, self.now + self.latency) + 1 / self.reads_per_second
                extra = self.random.random() * self.noise * self.latency
                heapq.heappush(self.under_way, (self.free + extra, self.now))
            self.now, begun = heapq.heappop(self.under_way)
            pace.finished(self.now - begun, BYTES, self.now)
        return num_reads / (self.now - began)


def median_limit(link: Link, pace: Pace) -> int:
    """The limit that it mostly has; it tries others now and then."""
    limits = []
    for _ in range(100):
        link.run(pace, 40)
        limits.append(pace.limit)
    return sorted(limits)[len(limits) // 2]


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(("latency", "rate"), [(0.02, 700.0), (0.002, 2500.0), (0.05, 300.0), (0.1, 10_000.0)], ids=str)
def test_it_finds_what_the_link_carries(latency: float, rate: float, noise: float) -> None:
    link, pace = Link(latency, rate, noise), Pace(64)
    link.run(pace, 2000)
    reached = link.run(pace, 2000)
    assert reached > 0.8 * min(rate, 64 / latency)


def test_it_does_not_stay_where_more_is_only_a_queue() -> None:
    link, pace = Link(0.01, 800.0), Pace(64)
    link.run(pace, 2000)
    assert median_limit(link, pace) <= 16, "8 under way fill this link"


def test_it_goes_down_when_the_link_gets_narrower_and_up_again() -> None:
    link, pace = Link(0.02, 3000.0), Pace(64)
    link.run(pace, 3000)
    wide = pace.limit
    link.reads_per_second = 300.0
    link.run(pace, 3000)
    assert median_limit(link, pace) <= wide // 4
    link.reads_per_second = 3000.0
    link.run(pace, 6000)
    assert median_limit(link, pace) >= wide // 2


def test_what_was_seen_while_nothing_waited_says_nothing() -> None:
    pace = Pace(64)
    for number in range(1000):
        pace.finished(0.01, BYTES, number * 10.0)
        pace.idle()
    assert pace.limit == FIRST


@pytest.mark.parametrize("most", [1, 2, 3, 64])
def test_it_keeps_within_bounds(most: int) -> None:
    link, pace = Link(0.05, 100_000.0), Pace(most)
    for _ in range(100):
        link.run(pace, 50)
        assert 1 <= pace.limit <= most

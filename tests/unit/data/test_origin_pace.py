"""ConcurrencyLimit: finds what a link can carry, does not stay above it, and follows it when it changes."""

from __future__ import annotations

import heapq
import random

import pytest

from shade.data._origin.read_pool import LEAST, ConcurrencyLimit


class Link:
    """Storage with a latency and a rate, in virtual time; always something left to read."""

    def __init__(self, latency: float, reads_per_second: float, noise: float = 0.0) -> None:
        self.latency, self.reads_per_second, self.noise = latency, reads_per_second, noise
        self.now = self.free = 0.0
        self.under_way: list[tuple[float, float]] = []
        self.random = random.Random(1)

    def run(self, pace: ConcurrencyLimit, num_reads: int) -> float:
        """Reads so many; returns reads a second."""
        began = self.now
        for _ in range(num_reads):
            while len(self.under_way) < pace.limit:
                self.free = max(self.free, self.now + self.latency) + 1 / self.reads_per_second
                extra = self.random.random() * self.noise * self.latency
                heapq.heappush(self.under_way, (self.free + extra, self.now))
            self.now, begun = heapq.heappop(self.under_way)
            pace.finished(self.now - begun)
        return num_reads / (self.now - began)


class Greedy(ConcurrencyLimit):
    """Everything at once, whatever comes of it."""

    def __init__(self) -> None:
        super().__init__(64)
        self.limit = 64

    def finished(self, seconds: float) -> None:
        pass


def in_bursts(
    paces: list[ConcurrencyLimit], latency: float, reads_per_second: float, pause: float, seconds: float = 30.0
) -> float:
    """Processes that share a link, each reading a batch and then busy for a while; reads a second of all together."""
    burst, rng = 51, random.Random(1)
    free, number, num_read = 0.0, 0, 0
    left, under_way = [0] * len(paces), [0] * len(paces)
    events: list[tuple[float, int, int, float | None]] = [
        (rng.random() * pause, -1 - process, process, None) for process in range(len(paces))
    ]
    heapq.heapify(events)
    while events[0][0] < seconds:
        now, _, process, begun = heapq.heappop(events)
        pace = paces[process]
        if begun is None:
            left[process] = burst
        else:
            num_read += 1
            under_way[process] -= 1
            if left[process]:
                pace.finished(now - begun)
            else:
                pace.idle()
            if not left[process] and not under_way[process]:
                number += 1
                heapq.heappush(events, (now + pause * (0.7 + 0.6 * rng.random()), number, process, None))
        while left[process] and under_way[process] < pace.limit:
            left[process] -= 1
            under_way[process] += 1
            number += 1
            free = max(free, now) + 1 / reads_per_second
            heapq.heappush(events, (free + latency * (1 + 0.2 * rng.random()), number, process, now))
    return num_read / seconds


def median_limit(link: Link, pace: ConcurrencyLimit) -> int:
    """The limit that it mostly has; it tries others now and then."""
    limits = []
    for _ in range(100):
        link.run(pace, 40)
        limits.append(pace.limit)
    return sorted(limits)[len(limits) // 2]


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(("latency", "rate"), [(0.02, 700.0), (0.002, 2500.0), (0.05, 300.0), (0.1, 10_000.0)], ids=str)
def test_it_finds_what_the_link_carries(latency: float, rate: float, noise: float) -> None:
    link, pace = Link(latency, rate, noise), ConcurrencyLimit(64)
    link.run(pace, 2000)
    reached = link.run(pace, 2000)
    assert reached > 0.8 * min(rate, 64 / latency)


def test_it_does_not_stay_where_more_is_only_a_queue() -> None:
    link, pace = Link(0.01, 800.0), ConcurrencyLimit(64)
    link.run(pace, 2000)
    assert median_limit(link, pace) <= 16, "8 under way fill this link"


def test_it_goes_down_when_the_link_gets_narrower_and_up_again() -> None:
    link, pace = Link(0.02, 3000.0), ConcurrencyLimit(64)
    link.run(pace, 3000)
    wide = pace.limit
    link.reads_per_second = 300.0
    link.run(pace, 3000)
    assert median_limit(link, pace) <= wide // 4
    link.reads_per_second = 3000.0
    link.run(pace, 6000)
    assert median_limit(link, pace) >= wide // 2


def test_what_was_seen_while_nothing_waited_says_nothing() -> None:
    pace = ConcurrencyLimit(64)
    for _ in range(1000):
        pace.finished(0.01)
        pace.idle()
    assert pace.limit == LEAST


@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize(("latency", "rate"), [(0.02, 640.0), (0.005, 300.0)], ids=str)
def test_nobody_is_starved_by_the_queue_of_another(latency: float, rate: float, num_processes: int) -> None:
    """Who went back because others queue would wait as long as before, and be served less."""
    paces = [ConcurrencyLimit(64) for _ in range(num_processes)]
    most = in_bursts([Greedy() for _ in range(num_processes)], latency, rate, 0.15)
    assert in_bursts(paces, latency, rate, 0.15) > 0.9 * most
    assert min(pace.limit for pace in paces) >= LEAST


@pytest.mark.parametrize("most", [1, 2, 3, 64])
def test_it_keeps_within_bounds(most: int) -> None:
    link, pace = Link(0.05, 100_000.0), ConcurrencyLimit(most)
    for _ in range(100):
        link.run(pace, 50)
        assert 1 <= pace.limit <= most

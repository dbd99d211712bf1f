"""How many chunks a fetch brings, and that no memory is given out again while it is in use."""

from __future__ import annotations

import math
import random

import pytest

from shade.checkpoint._flush.flusher import MOST_BYTES, BufferRing, FetchPace, batches

PAGE = 4096


def test_the_first_fetches_differ_so_that_there_is_a_line() -> None:
    pace = FetchPace()
    asked = []
    for _ in range(4):
        asked.append(pace.num_chunks(1000))
        pace.fetched(asked[-1], 0.01 + 0.001 * asked[-1])
    assert asked == [1, 2, 4, 8]
    assert pace.num_chunks(1000) == round(math.sqrt(1000 * 0.01 / 0.001))


def test_a_line_outlasts_fetches_that_are_all_alike() -> None:
    pace = FetchPace()
    for num in (1, 2, 4, 8):
        pace.fetched(num, 0.01 + 0.001 * num)
    for _ in range(1000):
        pace.fetched(100, 0.01 + 0.001 * 100)
    assert pace.num_chunks(1000) == 100
    pace.begin()
    asked = []
    for _ in range(4):
        asked.append(pace.num_chunks(1000))
        pace.fetched(asked[-1], 0.04 + 0.001 * asked[-1])
    assert asked == [1, 2, 4, 8]
    for _ in range(40):
        for num in (1, 2, 4, 8, 100):
            pace.fetched(num, 0.04 + 0.001 * num)
    assert pace.num_chunks(1000) == 200, "what has changed is followed"


@pytest.mark.parametrize("seed", range(20))
def test_the_number_is_the_minimum_of_the_cost(seed: int) -> None:
    dice = random.Random(seed)
    latency, each, num_all = 10 ** dice.uniform(-4, -2), 10 ** dice.uniform(-4, -2), dice.randrange(50, 2000)
    pace = FetchPace()
    for num in (1, 2, 4, 8):
        pace.fetched(num, latency + each * num)

    def cost(num: int) -> float:
        return num_all / num * latency + num * each

    best = min(range(1, num_all + 1), key=cost)
    assert cost(pace.num_chunks(num_all)) <= 1.05 * cost(best)


def test_fetches_that_cost_nothing_by_length_bring_everything() -> None:
    pace = FetchPace()
    for num in (1, 2, 4, 8):
        pace.fetched(num, 0.01)
    assert pace.num_chunks(500) == 500


def test_batches_cover_all_chunks_once_and_keep_within_memory() -> None:
    dice = random.Random(0)
    pace = FetchPace()
    for num in (1, 2, 4, 8):
        pace.fetched(num, 0.1 + 1e-6 * num)
    lengths = [dice.choice([16] * 6 + [40_000, 4 << 20, MOST_BYTES + 1]) for _ in range(300)]
    found = list(batches(lengths, pace, len(lengths)))
    assert [number for each in found for number in each] == list(range(300))
    for each in found:
        total = sum(-(-lengths[number] // PAGE) * PAGE for number in each)
        assert len(each) == 1 or total <= MOST_BYTES
    assert max(map(len, found)) > 8, "small ones go together"


@pytest.mark.parametrize("seed", range(5))
def test_what_may_be_in_use_is_never_given_out_again(seed: int) -> None:
    dice = random.Random(seed)
    num_held, longest = 3, 5 << 20
    ring = BufferRing(longest, num_held)
    fetches: list[list[memoryview]] = []
    for _ in range(60):
        lengths = [longest]
        if dice.random() < 0.7:
            lengths = [dice.choice([16, 5000, 40_000, MOST_BYTES // 3]) for _ in range(dice.randrange(1, 30))]
            while sum(-(-length // PAGE) * PAGE for length in lengths) > MOST_BYTES:
                lengths.pop()
        held = [piece for fetch in fetches for piece in fetch]
        taken = ring.take(lengths)
        assert [len(each) for each in taken] == lengths
        live = [*held, *taken]
        for number, piece in enumerate(live):
            piece[0] = piece[-1] = number
        marks = list(range(len(live)))
        assert [piece[0] for piece in live] == [piece[-1] for piece in live] == marks, "two pieces share memory"
        fetches = [*fetches, taken][-num_held:]

"""The merged future of several jobs: when each sample is used next, and what keeping the soonest is worth."""

from __future__ import annotations

import numpy as np
import pytest

from shade.policy.streams import NEVER, Stream, latest_used, seconds_to_next_use


def stream(*orders: list[int], cursor: int = 0, rate: float = 1.0, num_samples: int = 6) -> Stream:
    made = Stream(num_samples)
    for epoch, order in enumerate(orders):
        made.learn(epoch, np.array(order))
    made.move(0, cursor)
    made.rate = rate
    return made


def test_a_use_is_in_this_epoch_or_in_the_next_or_nowhere() -> None:
    one = stream([3, 1, 2, 0], [1, 3, 4], cursor=1)
    #             0  1  2    3      4  5
    assert one.seconds_to(np.arange(6)).tolist() == [2.0, 0.0, 1.0, 4.0, 5.0, NEVER]


def test_the_faster_job_comes_first() -> None:
    slow, fast = stream([0, 1, 2], rate=1.0), stream([1, 2, 0], rate=4.0)
    assert seconds_to_next_use(np.arange(4), [slow, fast]).tolist() == [0.0, 0.0, 0.25, NEVER]


def test_an_epoch_that_is_over_is_forgotten_and_one_that_is_not_known_says_nothing() -> None:
    one = stream([0, 1], [1, 0])
    one.move(1, 1)
    assert one.epochs == [1]
    assert one.seconds_to(np.arange(2)).tolist() == [0.0, NEVER]
    one.move(5, 0)
    assert one.seconds_to(np.arange(2)).tolist() == [NEVER, NEVER]


def test_those_used_last_leave_until_there_is_room() -> None:
    wait, size = np.array([5.0, NEVER, 1.0, 7.0]), np.array([10, 10, 10, 10])
    assert latest_used(wait, size, 0).tolist() == [False] * 4
    assert latest_used(wait, size, 1).tolist() == [False, True, False, False]
    assert latest_used(wait, size, 11).tolist() == [False, True, False, True]
    assert latest_used(wait, size, 10**6).tolist() == [True] * 4


def hits_of(fraction: float, offset: int, num_samples: int = 900, num_jobs: int = 3) -> float:
    """The share of uses that hit, of jobs that begin so many samples apart and keep what any uses soonest."""
    batch, num_steps = 15, 5 * num_samples // 15
    rngs = [np.random.default_rng(seed) for seed in range(num_jobs)]
    orders = [[rng.permutation(num_samples) for _ in range(9)] for rng in rngs]
    streams = [Stream(num_samples) for _ in range(num_jobs)]
    resident_N, capacity = np.zeros(num_samples, dtype=bool), int(fraction * num_samples)
    hits = []
    for step in range(num_steps):
        for job, (one, mine) in enumerate(zip(streams, orders, strict=True)):
            epoch, start = divmod(step * batch + job * offset, num_samples)
            for known in (epoch, epoch + 1):
                if known not in one.epochs:
                    one.learn(known, mine[known])
            index_B = mine[epoch][start : start + batch]
            hits.append(resident_N[index_B].mean())
            one.move(epoch, start + batch)
            resident_N[index_B] = True
            held = np.flatnonzero(resident_N)
            leaves = latest_used(seconds_to_next_use(held, streams), np.ones_like(held), len(held) - capacity)
            resident_N[held[leaves]] = False
    return float(np.mean(hits[len(hits) // 2 :]))


@pytest.mark.parametrize("offset", [0, 300])
@pytest.mark.parametrize(("fraction", "expected"), [(0.1, 0.34), (0.2, 0.47), (0.4, 0.64)])
def test_three_jobs_hit_what_the_formula_says(fraction: float, expected: float, offset: int) -> None:
    """f = J / (J - 1) · (1 - (1 + x) exp(-x)), hits 1 - exp(-x), and a little for what the same job uses again soon."""
    assert expected - 0.01 <= hits_of(fraction, offset) <= expected + 0.06

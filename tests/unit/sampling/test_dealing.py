"""Every position goes to one rank, in equal numbers of steps, from any cursor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shade.errors import ConfigError
from shade.sampling.dealing import num_steps, rank_order, rank_positions, rank_slice

worlds = st.tuples(st.integers(1, 300), st.integers(1, 9), st.integers(1, 6))  # K, B, W


@settings(deadline=None)
@given(worlds)
def test_positions_partition_the_epoch(world: tuple[int, int, int]) -> None:
    num_drawn, batch, world_size = world
    total = batch * world_size
    positions = [
        rank_positions(r, num_drawn=num_drawn, global_batch=total, world_size=world_size) for r in range(world_size)
    ]
    times = np.bincount(np.concatenate(positions), minlength=num_drawn)
    tail = num_drawn % total
    padding = world_size - tail if 0 < tail < world_size else 0
    assert times.min() >= 1
    assert times.sum() == num_drawn + padding
    assert len({-(-len(p) // batch) for p in positions}) == 1
    assert max(map(len, positions)) - min(map(len, positions)) <= 1


@settings(deadline=None)
@given(worlds)
def test_slices_are_the_positions_step_by_step(world: tuple[int, int, int]) -> None:
    num_drawn, batch, world_size = world
    total = batch * world_size
    for rank in range(world_size):
        stepwise = [
            position % num_drawn
            for step in range(num_steps(num_drawn, total))
            for position in rank_slice(step, rank, num_drawn=num_drawn, global_batch=total, world_size=world_size)
        ]
        whole = rank_positions(rank, num_drawn=num_drawn, global_batch=total, world_size=world_size)
        assert stepwise == whole.tolist()


@settings(deadline=None)
@given(worlds)
def test_drop_last_leaves_whole_steps_only(world: tuple[int, int, int]) -> None:
    num_drawn, batch, world_size = world
    total = batch * world_size
    steps = num_steps(num_drawn, total, drop_last=True)
    for rank in range(world_size):
        taken = rank_positions(rank, num_drawn=num_drawn, global_batch=total, world_size=world_size, drop_last=True)
        assert len(taken) == steps * batch
        assert len(np.unique(taken)) == len(taken)


@pytest.mark.parametrize("after", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("num_drawn", [120, 125, 121])
def test_resume_with_other_ranks_goes_on_with_the_same_steps(after: int, num_drawn: int) -> None:
    total, cursor = 12, 60
    order_K = np.random.default_rng(0).permutation(num_drawn)
    shares = [
        rank_order(order_K, rank, global_batch=total, world_size=after, cursor=cursor).tolist() for rank in range(after)
    ]
    batch = total // after
    for step in range(cursor // total, num_drawn // total):
        start = step * batch - cursor // after
        together = [index for share in shares for index in share[start : start + batch]]
        assert together == order_K[step * total : (step + 1) * total].tolist()
    assert set(order_K[cursor:]) <= {index for share in shares for index in share}


def test_padding_repeats_the_first_samples_of_the_epoch() -> None:
    order_K = np.array([10, 11, 12, 13, 14, 15, 16, 17, 18])
    shares = [rank_order(order_K, r, global_batch=8, world_size=4).tolist() for r in range(4)]
    assert shares == [[10, 11, 18], [12, 13, 10], [14, 15, 11], [16, 17, 12]]


def test_fewer_samples_than_ranks() -> None:
    shares = [rank_order(np.array([5]), r, global_batch=4, world_size=4).tolist() for r in range(4)]
    assert shares == [[5], [5], [5], [5]]


def test_a_finished_epoch_has_nothing_left() -> None:
    for num_drawn in (24, 25):
        assert len(rank_positions(1, num_drawn=num_drawn, global_batch=8, world_size=2, cursor=num_drawn)) == 0


@pytest.mark.parametrize(
    ("rank", "total", "world_size", "cursor", "cure"),
    [
        (0, 7, 2, 0, "batch size × ranks"),
        (2, 8, 2, 0, "RANK"),
        (-1, 8, 2, 0, "RANK"),
        (0, 8, 2, 5, "resume with the global batch"),
        (0, 8, 2, -8, "resume with the global batch"),
    ],
)
def test_what_cannot_be_shared_is_refused(rank: int, total: int, world_size: int, cursor: int, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        rank_positions(rank, num_drawn=40, global_batch=total, world_size=world_size, cursor=cursor)

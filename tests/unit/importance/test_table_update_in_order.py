"""Joining batches of reports gives the table that one after the other gives, for every strategy."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shade.errors import ConfigError
from shade.importance import SCORES, ImportanceTable

N = 40
losses = st.floats(0, 1e6, width=32) | st.sampled_from([float("nan"), float("inf")])
batch = st.lists(st.tuples(st.integers(-1, N), losses), max_size=6)


@pytest.mark.filterwarnings("ignore:report\\(\\) got a loss that is NaN")
@pytest.mark.filterwarnings("ignore:half of the losses")
@pytest.mark.parametrize("score", sorted(SCORES))
@given(lists=st.lists(batch, max_size=6))
def test_joined_or_not_the_table_is_the_same(score: str, lists: list[list[tuple[int, float]]]) -> None:
    batches = [
        (np.array([i for i, _ in pairs], dtype=np.int64), np.array([x for _, x in pairs], dtype=np.float32))
        for pairs in lists
    ]
    joined, single = ImportanceTable(N, score), ImportanceTable(N, score)
    with contextlib.suppress(ConfigError):
        for index_B, loss_B in batches:
            single.update(index_B, loss_B)
    with contextlib.suppress(ConfigError):
        joined.update_in_order(
            np.concatenate([np.empty(0, np.int64), *(index_B for index_B, _ in batches)]),
            np.concatenate([np.empty(0, np.float32), *(loss_B for _, loss_B in batches)]),
            [len(index_B) for index_B, _ in batches],
        )
    assert joined.score_N.tobytes() == single.score_N.tobytes()
    assert joined.seen_N.tobytes() == single.seen_N.tobytes()
    assert joined.num_ignored == single.num_ignored

"""Windows of a pass get shares of a state in proportion to their lengths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shade.checkpoint._strategies.windows import partition

seconds = st.floats(0, 1e3)


@given(st.integers(0, 10**13), st.lists(seconds, min_size=1, max_size=300))
def test_partitions_add_up_to_the_state_exactly(num_bytes: int, windows: list[float]) -> None:
    sizes = partition(num_bytes, windows)
    assert len(sizes) == len(windows)
    assert sum(sizes) == num_bytes
    assert min(sizes) >= 0


@given(st.integers(0, 10**10), st.lists(seconds, min_size=1, max_size=50).filter(lambda windows: sum(windows) > 1e-3))
def test_each_window_gets_its_share_of_the_time(num_bytes: int, windows: list[float]) -> None:
    total = sum(windows)
    for size, window in zip(partition(num_bytes, windows), windows, strict=True):
        assert abs(size - num_bytes * window / total) <= 1 + 1e-6 * num_bytes


def test_without_windows_or_measurements() -> None:
    assert partition(100, []) == []
    assert partition(100, [0.0, 0.0, 0.0, 0.0]) == [25, 25, 25, 25]

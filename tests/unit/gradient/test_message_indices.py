"""Ascending indices survive the code, in few bytes; other bytes are refused before they cost memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from shade.errors import PayloadError
from shade.gradient._comm import message
from tests.support import kernel_oracle


@pytest.fixture(params=["numba", "numpy"])
def _loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(message, "build", lambda _: kernel_oracle)


def drawn(size: int, density: float, seed: int = 0) -> npt.NDArray[np.uint32]:
    return np.flatnonzero(np.random.default_rng(seed).random(size) < density).astype(np.uint32)


CASES = {
    "none": [],
    "zero": [0],
    "last": [2**32 - 1],
    "all": list(range(300)),
    "edges": [253, 253 + 255, 253 + 255 + 65536, 253 + 255 + 65536 + 65537, 2**32 - 1],
    "codes": [254, 509, 765, 1022, 65535 + 1023, 2**31],
}


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize("name", CASES)
def test_indices_come_back(name: str) -> None:
    given = np.array(CASES[name], dtype=np.uint32)
    data = message.encode(given)
    again = message.decode(data, len(given))
    assert again.dtype == np.uint32
    np.testing.assert_array_equal(again, given)
    assert len(data) <= 5 * len(given)


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize(("density", "most_bytes"), [(0.0005, 2.8), (0.001, 2.6), (0.01, 1.17), (0.1, 1.001), (1, 1)])
def test_an_index_takes_little_more_than_a_byte(density: float, most_bytes: float) -> None:
    given = drawn(2_000_000, density)
    data = message.encode(given)
    assert len(data) <= most_bytes * len(given)
    np.testing.assert_array_equal(message.decode(data, len(given), 2_000_000), given)


def test_both_ways_write_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for density in (0.9, 0.01, 0.00003):
        given = drawn(3_000_000, density, seed=1)
        compiled = message.encode(given)
        with monkeypatch.context() as forced:
            forced.setattr(message, "build", lambda _: kernel_oracle)
            np.testing.assert_array_equal(message.encode(given), compiled)


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize(
    ("data", "count"),
    [
        ([1, 2], 3),
        ([1, 2, 3], 2),
        ([254, 1], 1),
        ([255, 1, 0, 0], 1),
        ([1], 2**60),
        ([], 1),
        ([1], -1),
        ([255, 255, 255, 255, 255, 255], 1),
    ],
)
def test_what_is_no_code_is_refused(data: list[int], count: int) -> None:
    with pytest.raises(PayloadError, match="sender and receiver differ"):
        message.decode(np.array(data, dtype=np.uint8), count)


@pytest.mark.usefixtures("_loops")
def test_an_index_out_of_range_is_refused() -> None:
    data = message.encode(np.array([5, 9], dtype=np.uint32))
    assert message.decode(data, 2, 10).tolist() == [5, 9]
    with pytest.raises(PayloadError, match="indices below 9, got 9"):
        message.decode(data, 2, 9)
    past = np.concatenate([np.full(2, 255, np.uint8), np.full(8, 255, np.uint8)])
    with pytest.raises(PayloadError, match="indices below 4294967296, got 8589934591"):
        message.decode(past, 2)

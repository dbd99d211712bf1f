"""An order within a window: the same samples, those of a block near each other, and nothing but the seed decides."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from shade.sampling import MODES, Scores, block_uses, window, windowed
from shade.sampling.base import Purpose, generator
from shade.types import Indices, Order

N, PER_BLOCK = 12_000, 40
FIRST_D = np.arange(0, N, PER_BLOCK)


def ordered(order_K: Order, window_length: int, epoch: int = 0, first_D: Indices = FIRST_D) -> Order:
    return windowed(order_K, first_D, window_length, generator(7, epoch, Purpose.WINDOW))


@pytest.mark.parametrize("window_length", [1, 3, 50, 1000, N])
@pytest.mark.parametrize("mode", list(MODES))
def test_an_epoch_keeps_its_samples_and_repeats(mode: str, window_length: int) -> None:
    rng = np.random.default_rng(0)
    scores = Scores(rng.gamma(1.0, 1.0, N).astype(np.float32), np.ones(N, dtype=bool))
    draw = MODES.get(mode)(N, 60, 7).draw(3, scores, resident_N=np.arange(N) % 5 == 0)
    found = ordered(draw.order_K, window_length)
    assert found.dtype == draw.order_K.dtype == np.int32
    np.testing.assert_array_equal(np.sort(found), np.sort(draw.order_K))


def test_it_depends_on_the_set_the_seed_and_the_epoch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    drawn = rng.permutation(N).astype(np.int32)[:9000]
    whole = ordered(drawn, 1000)
    assert ordered(rng.permutation(drawn), 1000).tobytes() == whole.tobytes()
    for part in (1, 100, 3000):
        monkeypatch.setattr(window, "PART", part)
        assert ordered(drawn, 1000).tobytes() == whole.tobytes()
    assert ordered(drawn, 1000, epoch=1).tobytes() != whole.tobytes()
    assert ordered(drawn, 1001).tobytes() != whole.tobytes()


def test_the_order_of_a_seed_stays_what_it_is() -> None:
    """A saved run must find the later epochs that it would have had."""
    found = ordered(np.arange(N, dtype=np.int32), 1000)
    assert xxhash.xxh3_64_hexdigest(found.tobytes()) == "29212d0e8d7145b3"


@pytest.mark.parametrize("window_length", [200, 2000])
def test_a_block_is_spread_over_the_window_and_no_further(window_length: int) -> None:
    order = ordered(np.arange(N, dtype=np.int32), window_length)
    uses = block_uses(order, FIRST_D)
    spread = uses.last_D - uses.first_D
    assert spread.max() <= 1.2 * window_length + PER_BLOCK  # places differ from random ones by their noise
    middle = uses.first_D[(uses.first_D > window_length) & (uses.first_D < N - 3 * window_length)]
    inner = np.isin(uses.first_D, middle)
    assert spread[inner].mean() > 0.9 * window_length
    # At a place in the middle, as many blocks are in use as the window holds, and one in each batch has few repeats.
    held = [int(((uses.first_D <= place) & (uses.last_D >= place)).sum()) for place in range(3000, 9000, 100)]
    assert max(held) <= 1.3 * window_length / PER_BLOCK + 2
    batch = order[5000:5050] // PER_BLOCK
    blocks_in_use = window_length / PER_BLOCK
    expected = blocks_in_use * (1 - (1 - 1 / blocks_in_use) ** 50)
    assert len(set(batch.tolist())) >= 0.75 * expected


def test_the_first_batches_mix_fewer_blocks_as_the_docstring_says() -> None:
    found = [len(set((ordered(np.arange(N), 2000, epoch)[:50] // PER_BLOCK).tolist())) for epoch in range(40)]
    assert 6 <= np.mean(found) <= 14  # about sqrt(2 * 50 * 2000) / 40 = 11


def test_every_place_of_the_epoch_gets_every_sample_alike() -> None:
    """Over many epochs a sample's mean place is the middle, as in a global order."""
    places = np.zeros(N)
    for epoch in range(200):
        places[ordered(np.arange(N), 500, epoch)] += np.arange(N)
    mean_D = (places / 200).reshape(-1, PER_BLOCK).mean(axis=1)
    error = N / np.sqrt(12) / np.sqrt(200)
    assert np.abs(mean_D - N / 2).max() < 5 * error
    inner = (places / 200).reshape(-1, PER_BLOCK).std(axis=1)
    assert inner.max() < 4 * 500 / np.sqrt(12) / np.sqrt(200)  # within a block none is always first


@pytest.mark.parametrize("start", [0, 1, 5000, N])
def test_uses_are_those_of_the_order(start: int) -> None:
    rng = np.random.default_rng(2)
    order = rng.choice(N, 9000).astype(np.int32)
    first_D = np.sort(rng.choice(np.arange(1, N), 70, replace=False))
    first_D[0] = 0
    uses = block_uses(order, first_D, start)
    places: dict[int, list[int]] = {}
    for place in range(start, len(order)):
        places.setdefault(int(np.searchsorted(first_D, order[place], side="right")) - 1, []).append(place)
    assert uses.sequence.tolist() == sorted(places, key=lambda block: places[block][0])
    assert {block: (each[0], each[-1]) for block, each in places.items()} == {
        block: (int(uses.first_D[block]), int(uses.last_D[block])) for block in places
    }
    unused = [block for block in range(len(first_D)) if block not in places]
    assert all(uses.last_D[block] == -1 and uses.first_D[block] == len(order) for block in unused)

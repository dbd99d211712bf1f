"""The erasure code: any k of k + r pieces give back the data, whichever they are."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from shade.checkpoint._tiers.erasure import ErasureCode, inverse, invert, multiply, padded_bytes, parity_rows
from shade.errors import ConfigError

SMALL = [(k, r) for k in range(1, 7) for r in range(1, 5)]


def encoded(code: ErasureCode, data: list[bytes], length: int) -> dict[int, bytes]:
    """All pieces by number, data as they are."""
    parity = [np.full(length, 255, np.uint8) for _ in range(code.num_parity)]
    code.encode(data, parity)
    pieces = dict(enumerate(data))
    pieces |= dict.fromkeys(range(len(data), code.num_data), b"")
    return pieces | {code.num_data + row: each.tobytes() for row, each in enumerate(parity)}


def test_the_field() -> None:
    assert [multiply(a, inverse(a)) for a in range(1, 256)] == [1] * 255
    assert multiply(0, 7) == multiply(7, 0) == 0
    rng = random.Random(0)
    for a, b, c in (rng.choices(range(256), k=3) for _ in range(500)):
        assert multiply(a, b ^ c) == multiply(a, b) ^ multiply(a, c)
        assert multiply(a, multiply(b, c)) == multiply(multiply(a, b), c)


@pytest.mark.parametrize(("k", "r"), [*SMALL, (10, 4), (16, 3)])
def test_any_k_rows_are_invertible(k: int, r: int) -> None:
    rows = [[int(i == j) for j in range(k)] for i in range(k)] + parity_rows(k, r)
    assert rows[k] == [1] * k
    for chosen in itertools.combinations(rows, k):
        back = invert(chosen)
        product = [
            [_dot(row, [other[column] for other in chosen]) for column in range(k)] for row in (back[0], back[-1])
        ]
        assert product == [[int(j == 0) for j in range(k)], [int(j == k - 1) for j in range(k)]]


def _dot(row: list[int], column: list[int]) -> int:
    total = 0
    for a, b in zip(row, column, strict=True):
        total ^= multiply(a, b)
    return total


def test_a_matrix_without_an_inverse_is_refused() -> None:
    with pytest.raises(ValueError, match="invertible"):
        invert([[1, 2], [1, 2]])


@pytest.mark.parametrize(("k", "r"), SMALL)
def test_every_piece_comes_back_from_any_k_others(k: int, r: int) -> None:
    rng = random.Random(k * 10 + r)
    data = [rng.randbytes(size) for size in [1000, *rng.choices(range(1001), k=k - 1)]]
    code, length = ErasureCode(k, r), padded_bytes(1000)
    pieces = encoded(code, data, length)
    for kept in itertools.combinations(pieces, k):
        for wanted in set(range(k)) - set(kept):
            content = code.rebuild(wanted, {number: pieces[number] for number in kept}, length)
            assert content[: len(data[wanted])].tobytes() == data[wanted]
            assert not content[len(data[wanted]) :].any()


def test_a_long_stripe_is_worked_on_in_blocks() -> None:
    rng = random.Random(1)
    length = padded_bytes(3_000_001)
    data = [rng.randbytes(3_000_001), rng.randbytes(2_999_999)]
    code = ErasureCode(2, 2)
    pieces = encoded(code, data, length)
    for wanted in (0, 1):
        content = code.rebuild(wanted, {2: pieces[2], 3: pieces[3]}, length)
        assert content[: len(data[wanted])].tobytes() == data[wanted]


def test_a_short_stripe_counts_as_zeros() -> None:
    code, length = ErasureCode(4, 2), padded_bytes(100)
    pieces = encoded(code, [b"a" * 100], length)
    lost = {number: piece for number, piece in pieces.items() if number in (1, 2, 3, 5)}
    assert code.rebuild(0, lost, length)[:100].tobytes() == b"a" * 100


def test_it_takes_views_and_odd_addresses() -> None:
    whole = memoryview(bytearray(random.Random(2).randbytes(1281)))
    data = [whole[1:641], whole[641:]]
    code, length = ErasureCode(2, 1), padded_bytes(640)
    parity = [np.empty(length, np.uint8)]
    code.encode(data, parity)
    assert parity[0].tobytes() == bytes(a ^ b for a, b in zip(*data, strict=True))


@pytest.mark.parametrize(("k", "r"), [(0, 1), (1, 0), (200, 57), (-1, 2)])
def test_numbers_that_cannot_be(k: int, r: int) -> None:
    with pytest.raises(ConfigError, match="256 at most"):
        ErasureCode(k, r)

"""Packing: every token once a pass, full sequences, shares of the tokens, one stream whatever was interrupted."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shade.sampling import PackedSequence, SequencePacker, adapted, shares_of
from shade.sampling.packing import SLACK, UNIT


def lengths(*sizes: int, mean: int = 60, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.geometric(1 / mean, size).astype(np.int64) for size in sizes]


def tokens_of(sequences: list[PackedSequence]) -> Counter[int]:
    found: Counter[int] = Counter()
    for packed in sequences:
        for piece in packed.pieces:
            found[piece.source] += piece.stop - piece.start
    return found


def filled(packed: PackedSequence) -> int:
    return sum(piece.stop - piece.start for piece in packed.pieces)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=20).filter(any), min_size=1, max_size=4),
    st.integers(2, 60),
    st.integers(1, 12),
    st.integers(0, 2**20),
)
def test_any_lengths_give_full_sequences_and_use_each_token_once_a_pass(
    sizes: list[list[int]], sequence_length: int, window: int, seed: int
) -> None:
    length_S = [np.array(each, np.int64) for each in sizes]
    share_S = shares_of([1.0 + number for number in range(len(sizes))])
    packer = SequencePacker(length_S, sequence_length, seed, window)
    sequences = packer.pack(share_S, 40)
    assert [packed.number for packed in sequences] == list(range(40))
    used: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for packed in sequences:
        assert sequence_length - int(SLACK * sequence_length) <= filled(packed) <= sequence_length
        for source, document, start, stop in packed.pieces:
            assert 0 <= start < stop <= length_S[source][document]
            used.setdefault((source, document), []).append((start, stop))
    for (source, document), parts in used.items():
        times = np.zeros(int(length_S[source][document]), np.int64)
        for start, stop in parts:
            times[start:stop] += 1
        # What waits in the window is of the last passes.
        assert times.max() <= packer.passes[source] + 1
        if packer.passes[source] > window + 1:
            assert times.min() >= packer.passes[source] - window - 1


def test_a_pass_is_complete_before_the_next_begins() -> None:
    length_S = lengths(50)
    packer = SequencePacker(length_S, 64, 3, window=1)
    total, sequences = int(length_S[0].sum()), []
    while packer.passes[0] < 2:
        sequences += packer.pack([UNIT], 1)
    seen = Counter((piece.document, place) for s in sequences for piece in s.pieces for place in range(*piece[2:]))
    assert len(seen) == total
    assert set(seen.values()) <= {1, 2, 3}
    assert sum(count >= 2 for count in seen.values()) >= total - 128  # all but what waits


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [1.0, 1.0, 1.0], [0.98, 0.01, 0.01]])
def test_shares_of_the_tokens_are_the_weights(weights: list[float]) -> None:
    """Within 0.1 %, with documents of very different lengths in the sources, small passes, and a thousand sequences."""
    length_S = [*lengths(3000, mean=40), *lengths(200, mean=700, seed=1), *lengths(10, mean=9000, seed=2)]
    sequences = SequencePacker(length_S, 512, 5, window=64).pack(shares_of(weights), 1500)
    found = tokens_of(sequences)
    for source, weight in enumerate(weights):
        assert abs(found[source] / found.total() - weight / sum(weights)) < 0.001
    assert found.total() / (1500 * 512) >= 0.98


def test_few_documents_are_cut() -> None:
    """End to end, one document a sequence would be."""
    length_S = lengths(5000, mean=60)
    sequences = SequencePacker(length_S, 512, 5, window=64).pack([UNIT], 500)
    whole = sum(p.stop - p.start == length_S[0][p.document] for s in sequences for p in s.pieces)
    cut = sum(len(s.pieces) for s in sequences) - whole
    assert cut < 0.1 * 500


def test_the_oldest_is_never_left_behind() -> None:
    """A document as long as a sequence fits no gap, and is taken all the same."""
    packer = SequencePacker([np.array([100] + [30] * 50, np.int64)], 100, 0, window=8)
    for _ in range(3):
        sequences = packer.pack([UNIT], 20)
        assert any(piece.document == 0 for packed in sequences for piece in packed.pieces)


def test_a_saved_state_continues_the_stream_anywhere() -> None:
    length_S, share_S = lengths(40, 30), shares_of([0.6, 0.4])
    whole = SequencePacker(length_S, 128, 7, 16)
    expected = whole.pack(share_S, 60)
    assert max(whole.passes) > 1
    for cut in (0, 1, 17, 59):
        before = SequencePacker(length_S, 128, 7, 16)
        head = before.pack(share_S, cut)
        after = SequencePacker(length_S, 128, 7, 16)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        assert head + after.pack(share_S, 60 - cut) == expected


def test_streams_of_other_seeds_differ() -> None:
    length_S, share_S = lengths(40, 30), shares_of([0.6, 0.4])
    assert SequencePacker(length_S, 128, 7, 16).pack(share_S, 5) != SequencePacker(length_S, 128, 8, 16).pack(
        share_S, 5
    )


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.floats(0, 3), st.floats(0, 1), st.integers(0, 99))
def test_adapted_shares_sum_and_keep_the_floor(weights: list[float], power: float, floor: float, seed: int) -> None:
    losses = np.random.default_rng(seed).random(len(weights)) * 10
    share_S = adapted(weights, losses.tolist(), power, floor)
    assert sum(share_S) == UNIT
    for share, weight in zip(share_S, weights, strict=True):
        assert share >= floor * weight / sum(weights) * UNIT - len(weights)


def test_adapted_by_example() -> None:
    assert np.allclose(np.array(adapted([0.6, 0.3, 0.1], [2, 6, 2], 1.0, 0.5)) / UNIT, [0.375, 0.5625, 0.0625])
    assert np.allclose(np.array(adapted([0.5, 0.5], [1, 9], 1.0, 0.5)) / UNIT, [0.25, 0.75])  # at the floor
    assert adapted([3, 1], [0.0, 0.0], 1.0, 0.5) == shares_of([3, 1])  # learnt by heart
    assert adapted([3, 1], [5.0, 1.0], 0.0, 0.0) == shares_of([3, 1])

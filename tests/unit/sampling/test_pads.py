"""SHADE's mode: biased as published, without the release's defects."""

from __future__ import annotations

import numpy as np
import pytest

from shade.errors import ConfigError
from shade.sampling import PadsMode, Scores, Validation

N, G = 2000, 50
RISING, FALLING = Validation((0.5, 0.6, 0.7)), Validation((0.7, 0.6, 0.5))


def scores_of(score_N: np.ndarray, seen_N: np.ndarray | None = None) -> Scores:
    return Scores(score_N.astype(np.float32), np.ones(len(score_N), dtype=bool) if seen_N is None else seen_N)


def times_drawn(mode: PadsMode, scores: Scores, epochs: int, validation: Validation | None = None) -> np.ndarray:
    times_N = np.zeros(N)
    for epoch in range(epochs):
        times_N += np.bincount(mode.draw(epoch, scores, validation=validation).order_K, minlength=N)
    return times_N


def test_frequency_follows_the_weight() -> None:
    weight_N = np.repeat([1.0, 2.0, 3.0, 4.0], N // 4)
    times = times_drawn(PadsMode(N, G, 0), scores_of(weight_N), 40).reshape(4, -1).sum(axis=1)
    np.testing.assert_allclose(times / times.sum(), [0.1, 0.2, 0.3, 0.4], atol=0.01)


def test_draws_with_replacement() -> None:
    draw = PadsMode(N, G, 0).draw(0, scores_of(np.ones(N)))
    assert len(draw.order_K) == N
    assert draw.receipt.mean_inclusion == pytest.approx(1 - np.exp(-1), abs=0.03)
    assert np.isnan(draw.receipt.weight_sum_z)
    assert draw.weight_N is None


def test_unseen_get_the_highest_weight() -> None:
    score_N = np.where(np.arange(N) < N // 2, 1.0, 3.0)
    seen_N = np.arange(N) % 2 == 0
    times = times_drawn(PadsMode(N, G, 0), Scores(np.where(seen_N, score_N, 0).astype(np.float32), seen_N), 40)
    assert times[~seen_N].mean() == pytest.approx(times[seen_N & (score_N == 3)].mean(), rel=0.05)
    assert times[~seen_N].mean() == pytest.approx(3 * times[seen_N & (score_N == 1)].mean(), rel=0.1)


@pytest.mark.parametrize(("replication", "share"), [(1.0, 0.2), (1.5, 0.3 / 1.1), (2.0, 0.4 / 1.2), (3.0, 0.6 / 1.4)])
def test_cached_samples_are_replicated(replication: float, share: float) -> None:
    resident_N = np.arange(N) % 5 == 0
    order_K = PadsMode(N, G, 0, replication_factor=replication).draw(1, None, resident_N=resident_N).order_K
    assert len(order_K) == N
    assert resident_N[order_K].mean() == pytest.approx(share, abs=0.03)


def test_hits_and_misses_are_interleaved() -> None:
    resident_N = np.arange(N) % 5 == 0
    hit_K = resident_N[PadsMode(N, G, 0, replication_factor=3.0).draw(1, None, resident_N=resident_N).order_K]
    by_tenth = hit_K.reshape(10, -1).mean(axis=1)
    assert by_tenth.max() - by_tenth.min() < 0.25
    assert by_tenth.min() > 0.2


def test_all_cached_or_none_still_is_one_epoch() -> None:
    for resident_N in (np.ones(N, dtype=bool), np.zeros(N, dtype=bool)):
        draw = PadsMode(N, G, 0, replication_factor=4.0).draw(1, None, resident_N=resident_N, validation=RISING)
        assert len(draw.order_K) == N


def test_cached_samples_never_crowd_out_the_rest() -> None:
    """The release's epochs became all cached when replication × hits reached N."""
    resident_N = np.arange(N) < N // 2
    order_K = PadsMode(N, G, 0, replication_factor=3.0).draw(1, None, resident_N=resident_N).order_K
    assert (~resident_N[order_K]).mean() == pytest.approx(0.25, abs=0.03)


def test_aggressive_repeats_the_most_drawn() -> None:
    mode, scores = PadsMode(N, G, 0), scores_of(np.ones(N))
    relaxed = np.bincount(mode.draw(3, scores, validation=FALLING).order_K, minlength=N)
    aggressive = np.bincount(mode.draw(3, scores, validation=RISING).order_K, minlength=N)
    often_N = relaxed >= 4
    np.testing.assert_array_equal(aggressive[often_N], 2 * relaxed[often_N])
    assert np.all(aggressive[relaxed == 0] == 0)
    assert np.count_nonzero(aggressive) == pytest.approx(np.count_nonzero(relaxed) - N // 4, abs=1)


def test_aggressive_ties_are_broken_at_random_not_by_index() -> None:
    """The release kept low indices, which in a class-sorted data set are whole classes."""
    targets_N = np.arange(N) * 10 // N
    mode = PadsMode(N, G, 0, targets_N=targets_N)
    times_N = times_drawn(mode, scores_of(np.ones(N)), 20, RISING)
    share_C = np.bincount(targets_N, weights=times_N) / times_N.sum()
    np.testing.assert_allclose(share_C, 0.1, atol=0.01)
    assert mode.draw(0, None, validation=RISING).receipt.class_drift < 0.05


@pytest.mark.parametrize(
    ("accuracies", "aggressive"),
    [
        ((), False),
        ((0.9,), False),
        ((0.1, 0.2), True),
        ((0.9, 0.1, 0.2, 0.3, 0.4), True),
        ((0.1, 0.9, 0.8, 0.7, 0.6), False),
        ((0.5, 0.5, 0.5), False),
        ((0.1, float("nan"), 0.3), False),
    ],
)
def test_mode_follows_three_changes_of_validation(accuracies: tuple[float, ...], aggressive: bool) -> None:
    mode = PadsMode(N, G, 0)
    with_it = mode.draw(4, None, validation=Validation(accuracies)).receipt
    assert (with_it.mean_inclusion < mode.draw(4, None).receipt.mean_inclusion) == aggressive


@pytest.mark.parametrize("replication", [0.5, 0.0, -1.0, 1.25, float("nan"), float("inf")])
def test_other_replication_factors_are_refused(replication: float) -> None:
    with pytest.raises(ConfigError, match=r"1, 1\.5, 2"):
        PadsMode(N, G, 0, replication_factor=replication)


def test_targets_of_another_data_set_are_refused() -> None:
    with pytest.raises(ConfigError, match="one class per sample"):
        PadsMode(N, G, 0, targets_N=np.zeros(3, dtype=np.int64))


@pytest.mark.slow
def test_more_samples_than_torch_multinomial_can_draw() -> None:
    num_samples = 2**24 + 5
    order_K = PadsMode(num_samples, 1024, 0).draw(0, None).order_K
    assert len(order_K) == num_samples
    assert order_K.max() > 2**24 - 1000

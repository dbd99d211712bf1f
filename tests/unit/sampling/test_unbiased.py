"""The default mode: its gradient is the full gradient, and the tests that say so can fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shade.errors import ConfigError
from shade.sampling import Draw, Scores, Targets, UnbiasedMode, UniformMode, base, large, measure

N, G = 640, 32
CRITICAL = 4.5
"""Standard errors; eight coordinates pass it by chance once in 20 000 runs, and the seeds are fixed."""


@pytest.fixture(autouse=True, params=["small", "large"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Draws the small sets of these tests as `shade.sampling.large` draws large ones, too."""
    if request.param == "large":
        monkeypatch.setattr(base, "LARGE", 0)
        monkeypatch.setattr(large, "BUCKET", 64)
    return str(request.param)


def seen(score_N: np.ndarray) -> Scores:
    return Scores(score_N.astype(np.float32), np.ones(len(score_N), dtype=bool))


class LinearModel:
    """Squared loss on data whose large residuals have a direction, so that a biased sampler shows."""

    def __init__(self) -> None:
        rng = np.random.default_rng(11)
        features_ND = rng.normal(size=(N, 8))
        features_ND[:, 0] = 1.0
        residual_N = rng.exponential(1.0, N) - 0.7
        self.gradient_ND = residual_N[:, None] * features_ND
        self.loss_N = residual_N**2
        self.full_D = self.gradient_ND.mean(axis=0)


def standard_errors_off(estimates_TD: np.ndarray, true_D: np.ndarray) -> float:
    """Largest distance of the mean from the truth, in standard errors of the mean."""
    error_D = estimates_TD.std(axis=0, ddof=1) / np.sqrt(len(estimates_TD))
    return float(np.max(np.abs(estimates_TD.mean(axis=0) - true_D) / error_D))


def estimates(model: LinearModel, weigh: Callable[[Draw], np.ndarray], targets_N: Targets | None = None) -> np.ndarray:
    """Gradient of 250 drawn epochs, each weighed by ``weigh``."""
    mode = UnbiasedMode(N, G, seed=3, keep=0.6, warmup_epochs=0, targets_N=targets_N)
    scores = seen(model.loss_N)
    rows = []
    for epoch in range(250):
        draw = mode.draw(epoch, scores)
        rows.append(weigh(draw)[draw.order_K] @ model.gradient_ND[draw.order_K] / N)
    return np.array(rows)


def as_drawn(draw: Draw) -> np.ndarray:
    assert draw.weight_N is not None
    return draw.weight_N


@pytest.mark.parametrize("with_classes", [False, True])
def test_gradient_over_epochs_is_the_full_gradient(with_classes: bool) -> None:
    model = LinearModel()
    targets_N = np.arange(N) * 7 // N if with_classes else None
    assert standard_errors_off(estimates(model, as_drawn, targets_N), model.full_D) < CRITICAL


BROKEN: dict[str, Callable[[Draw], np.ndarray]] = {
    "weights of the next sample": lambda draw: np.roll(as_drawn(draw), 1),
    "no weights": lambda draw: np.full(N, N / len(draw.order_K)),
    "self-normalised by position": lambda draw: np.sort(as_drawn(draw)),
}


@pytest.mark.parametrize("fault", list(BROKEN))
def test_the_same_test_convicts_a_broken_sampler(fault: str) -> None:
    model = LinearModel()
    assert standard_errors_off(estimates(model, BROKEN[fault]), model.full_D) > CRITICAL


def test_stale_scores_bias_nothing() -> None:
    model = LinearModel()
    model_with_wrong_scores = LinearModel()
    model_with_wrong_scores.loss_N = np.random.default_rng(0).permutation(model.loss_N)
    assert standard_errors_off(estimates(model_with_wrong_scores, as_drawn), model.full_D) < CRITICAL


@pytest.mark.parametrize("with_classes", [False, True])
def test_receipts_are_sane_over_many_draws(with_classes: bool) -> None:
    num_samples = 5000
    rng = np.random.default_rng(1)
    targets_N = np.sort(rng.integers(0, 20, num_samples)) if with_classes else None
    mode = UnbiasedMode(num_samples, 50, seed=0, warmup_epochs=0, targets_N=targets_N)
    receipts = [mode.draw(epoch, seen(rng.gamma(1, 1, num_samples))).receipt for epoch in range(200)]
    z = np.array([receipt.weight_sum_z for receipt in receipts])
    assert np.abs(z).max() < 4
    assert abs(z.mean()) < 4 / np.sqrt(200)
    assert 0.75 < z.std() < 1.3
    for receipt in receipts:
        assert receipt.drawn == 3500
        assert receipt.mean_inclusion == pytest.approx(0.7)
        assert receipt.max_weight <= 1 / 0.3 + 1e-4
        assert 0.5 * 3500 < receipt.effective_sample_size < 3500
        assert np.isnan(receipt.class_drift) != with_classes
        if with_classes:
            assert receipt.class_drift < 0.01


def test_receipt_convicts_a_broken_draw(path: str) -> None:
    num_samples = 5000
    rng = np.random.default_rng(2)
    seed = {"small": 0, "large": 1}[path]  # 50 samples less are 3.5 deviations: seeds whose sum was below N before
    draw = UnbiasedMode(num_samples, 50, seed=seed, warmup_epochs=0).draw(0, seen(rng.gamma(1, 1, num_samples)))
    weight_N = as_drawn(draw)
    assert abs(measure(draw.order_K, weight_N).weight_sum_z) < 4
    without_regard = rng.permutation(num_samples)[: len(draw.order_K)]
    assert abs(measure(without_regard, weight_N).weight_sum_z) > 4
    assert abs(measure(draw.order_K, np.roll(weight_N, 1)).weight_sum_z) > 4
    assert abs(measure(draw.order_K, np.ones_like(weight_N)).weight_sum_z) > 4
    assert abs(measure(draw.order_K[:-50], weight_N).weight_sum_z) > 4


def test_equal_scores_give_equal_weights_and_a_quiet_receipt() -> None:
    draw = UnbiasedMode(N, G, seed=0, warmup_epochs=0).draw(0, seen(np.ones(N)))
    assert abs(draw.receipt.weight_sum_z) < 1
    np.testing.assert_allclose(as_drawn(draw), N / len(draw.order_K), rtol=1e-6)


def test_keep_one_is_the_plain_shuffle() -> None:
    mode = UnbiasedMode(N, G, seed=9, keep=1.0)
    assert not mode.uses_weights
    assert not mode.uses_scores
    for epoch in (0, 3, 50):
        draw = mode.draw(epoch, seen(np.arange(N)))
        np.testing.assert_array_equal(np.sort(draw.order_K), np.arange(N))
        np.testing.assert_array_equal(draw.order_K, UniformMode(N, G, seed=9).draw(epoch, None).order_K)
        assert draw.weight_N is None


def test_first_and_last_epochs_are_full() -> None:
    mode = UnbiasedMode(N, G, seed=0, warmup_epochs=3, epochs=20)
    scores = seen(np.arange(N))
    full = [epoch for epoch in range(20) if len(mode.draw(epoch, scores).order_K) == N]
    assert full == [0, 1, 2, 17, 18, 19]


def test_unseen_are_certain_and_may_raise_the_budget() -> None:
    score_N = np.random.default_rng(0).gamma(1, 1, N).astype(np.float32)
    for num_unseen in (10, 300, 500, N - 1, N):
        seen_N = np.arange(N) >= num_unseen
        draw = UnbiasedMode(N, G, seed=0, warmup_epochs=0).draw(0, Scores(np.where(seen_N, score_N, 0), seen_N))
        assert set(range(num_unseen)) <= set(draw.order_K.tolist())
        assert len(draw.order_K) == N or len(draw.order_K) % G == 0
        if draw.weight_N is not None:
            assert np.all(draw.weight_N[:num_unseen] == 1)
            assert draw.weight_N.max() <= 1 / 0.3 + 1e-4


def test_scores_count_only_by_ratio_and_up_to_the_cap() -> None:
    rng = np.random.default_rng(5)
    score_N = rng.gamma(1, 1, N)
    mode = UnbiasedMode(N, G, seed=0, warmup_epochs=0)
    base = as_drawn(mode.draw(0, seen(score_N)))
    np.testing.assert_allclose(as_drawn(mode.draw(0, seen(score_N * 1024))), base, rtol=1e-5)
    outliers = score_N.copy()
    outliers[np.argsort(score_N)[-20:]] *= 1e6  # 3 % of the samples: mislabelled, say
    np.testing.assert_allclose(as_drawn(mode.draw(0, seen(outliers))), base, rtol=1e-5)


def test_every_class_keeps_its_floor() -> None:
    targets_N = np.concatenate([np.zeros(N - 13), np.full(10, 5), [77, 77], [-4]]).astype(np.int64)
    easy_rare = np.where(targets_N == 0, 5.0, 1e-6)
    mode = UnbiasedMode(N, G, seed=0, keep=0.5, warmup_epochs=0, targets_N=targets_N)
    for epoch in range(100):
        drawn = targets_N[mode.draw(epoch, seen(easy_rare)).order_K]
        assert (drawn == 5).sum() >= 3
        assert (drawn == 77).sum() >= 1
        assert (drawn == -4).sum() == 1


def test_order_is_shuffled_not_sorted_by_class() -> None:
    targets_N = np.arange(N) * 10 // N
    order_K = UnbiasedMode(N, G, seed=0, warmup_epochs=0, targets_N=targets_N).draw(0, seen(np.ones(N))).order_K
    assert len(np.unique(targets_N[order_K[:G]])) >= 7


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"keep": 0.0}, "keep in"),
        ({"keep": 1.01}, "keep in"),
        ({"keep": float("nan")}, "keep in"),
        ({"pi_min": 0.0}, "pi_min in"),
        ({"keep": 0.2}, "pi_min in"),
        ({"warmup_epochs": -1}, "warmup_epochs"),
        ({"epochs": 0}, "epochs"),
        ({"targets_N": np.zeros(3, dtype=np.int64)}, "one class per sample"),
    ],
)
def test_bad_settings_say_what_to_do(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        UnbiasedMode(N, G, 0, **arguments)  # type: ignore[arg-type]

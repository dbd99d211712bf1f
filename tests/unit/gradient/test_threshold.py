"""Sampled thresholds pick the wanted number at every step, with nearly the energy of the best choice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shade.gradient._compress.compressor import COMPRESSORS, Key
from shade.gradient._compress.error_feedback import ErrorFeedback
from shade.gradient._compress.quantiser import QUANTISERS
from shade.gradient._compress.threshold import ThresholdCompressor, are_largest
from shade.gradient._kernels.lines import aligned_zeros
from shade.types import Floats

SIZE, NUM_STEPS, DENSITY = 200_000, 25, 0.01
STREAMS = ("stationary", "decaying", "bursty", "lasting", "heavy", "independent")


def stream(kind: str, size: int = SIZE) -> Iterator[Floats]:
    """Gradients, step by step, of layers whose rows differ in scale."""
    rng = np.random.default_rng(7)
    row_D = np.exp(1.5 * rng.standard_normal(size // 500 + 1)).repeat(500)[:size].astype(np.float32)
    if kind == "independent":
        row_D[:] = 1
    lasting_D = rng.standard_normal(size, dtype=np.float32) * row_D
    for step in range(NUM_STEPS):
        gradient_D = rng.standard_normal(size, dtype=np.float32) * row_D
        if kind == "decaying":
            gradient_D *= np.float32(0.9**step)
        elif kind == "bursty":
            start = int(rng.integers(size - size // 200))
            gradient_D[start : start + size // 200] *= np.float32(30)
            gradient_D *= np.float32(rng.choice([0.01, 1.0, 20.0]))
        elif kind == "lasting":
            gradient_D = np.float32(0.3) * gradient_D + lasting_D
        elif kind == "heavy":
            gradient_D = rng.standard_t(2, size).astype(np.float32)
        yield gradient_D


def energy(values: Floats) -> float:
    """The sum of squares."""
    return float((values.astype(np.float64) ** 2).sum())


def best_elements(sum_D: Floats, count: int) -> float:
    """The most energy that so many elements can hold."""
    return energy(np.partition(np.abs(sum_D), sum_D.size - count)[sum_D.size - count :])


def best_lines(sum_D: Floats, count: int) -> float:
    """The most energy that so many elements can hold, in whole lines of 16."""
    energy_L = (sum_D.astype(np.float64) ** 2).reshape(-1, 16).sum(axis=1)
    return float(np.sort(energy_L)[len(energy_L) - count // 16 :].sum())


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize(("name", "best"), [("threshold-v", best_elements), ("threshold-v16", best_lines)])
def test_every_step_catches_the_energy_and_the_count(name: str, best: object, kind: str) -> None:
    assert callable(best)
    memory = ErrorFeedback(SIZE, COMPRESSORS.get(name)(), QUANTISERS.get("none")())
    wanted = DENSITY * SIZE
    for step, gradient_D in enumerate(stream(kind)):
        sum_D = memory.residual_D + gradient_D
        picked = memory.compress(gradient_D, DENSITY, Key(3, step, 0))
        assert 0.9 * wanted <= picked.count <= 1.1 * wanted, f"step {step}"
        assert energy(picked.values_K) >= 0.999 * best(sum_D, picked.count), f"step {step}"


@pytest.mark.parametrize("kind", ["stationary", "lasting", "independent"])
def test_what_a_line_costs_in_energy(kind: str) -> None:
    memory = ErrorFeedback(SIZE, COMPRESSORS.get("threshold-v16")(), QUANTISERS.get("none")())
    shares = []
    for step, gradient_D in enumerate(stream(kind)):
        sum_D = memory.residual_D + gradient_D
        picked = memory.compress(gradient_D, DENSITY, Key(3, step, 0))
        shares.append(energy(picked.values_K) / best_elements(sum_D, picked.count))
    assert min(shares[10:]) > {"stationary": 0.3, "lasting": 0.3, "independent": 0.2}[kind]
    assert max(shares) <= 1.0 + 1e-6


def test_topk_is_exact() -> None:
    compressor, rest_D = COMPRESSORS.get("topk")(), aligned_zeros(SIZE)
    residual_D = np.zeros(SIZE, dtype=np.float32)
    for step, gradient_D in enumerate(stream("stationary")):
        picked = compressor.select(gradient_D, residual_D, rest_D, 0.003, Key(3, step, 0))
        last = np.partition(np.abs(gradient_D), SIZE - 600)[SIZE - 600]
        np.testing.assert_array_equal(picked.indices_K, np.flatnonzero(np.abs(gradient_D) >= last))


@pytest.mark.parametrize("name", ["topk", "threshold-v", "threshold-v16"])
def test_equal_values_are_picked_as_often_as_wanted(name: str) -> None:
    compressor, rest_D = COMPRESSORS.get(name)(), aligned_zeros(SIZE)
    gradient_D = np.where(np.arange(SIZE) % 2, 1, -1).astype(np.float32)
    picked = compressor.select(gradient_D, np.zeros_like(gradient_D), rest_D, 0.01, Key(3, 0, 0))
    assert picked.count == SIZE // 100
    np.testing.assert_array_equal(picked.dense() + rest_D, gradient_D)


@pytest.mark.parametrize("name", ["topk", "threshold-v", "threshold-v16"])
def test_no_place_starves_among_equals(name: str) -> None:
    memory = ErrorFeedback(SIZE, COMPRESSORS.get(name)(), QUANTISERS.get("none")())
    sent_D = np.zeros(SIZE)
    for step in range(12):
        sent_D += memory.compress(np.ones(SIZE, dtype=np.float32), 0.1, Key(3, step, 0)).dense()
    assert (sent_D > 0).all()


@pytest.mark.parametrize("name", ["topk", "threshold-v", "threshold-v16"])
def test_a_bucket_that_is_nearly_all_zero_sends_what_is_not(name: str) -> None:
    compressor, rest_D = COMPRESSORS.get(name)(), aligned_zeros(SIZE)
    gradient_D = np.zeros(SIZE, dtype=np.float32)
    places = np.arange(0, SIZE, 1601)
    gradient_D[places] = np.linspace(1e-15, 1, len(places)).astype(np.float32)
    picked = compressor.select(gradient_D, np.zeros_like(gradient_D), rest_D, 0.05, Key(3, 0, 0))
    assert not rest_D.any()
    assert picked.count <= len(places) * (16 if name == "threshold-v16" else 1)


@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e19, 1e37])
@pytest.mark.parametrize("name", ["topk", "threshold-v", "threshold-v16"])
def test_the_choice_does_not_depend_on_the_scale(name: str, scale: float) -> None:
    compressor, rest_D = COMPRESSORS.get(name)(), aligned_zeros(SIZE)
    residual_D = np.zeros(SIZE, dtype=np.float32)
    gradient_D = next(stream("independent"))
    power = np.float32(2.0 ** round(np.log2(scale)))
    expected = compressor.select(gradient_D, residual_D, rest_D, 0.01, Key(3, 0, 0)).indices_K.copy()
    scaled = compressor.select(gradient_D * power, residual_D, rest_D, 0.01, Key(3, 0, 0)).indices_K
    np.testing.assert_array_equal(scaled, expected)


class Misled(COMPRESSORS.get("threshold-v")):  # type: ignore[misc]
    """One whose sample says nothing about the bucket, and that counts its walks."""

    factor = 1.0
    num_passes = 0

    def _threshold(self, fraction: float) -> float:
        return float(super()._threshold(fraction)) * self.factor

    def _pick_above(self, *arguments: object) -> int:
        self.num_passes += 1
        return int(super()._pick_above(*arguments))


@pytest.mark.parametrize(("factor", "num_passes"), [(1.0, 1), (3.0, 2), (0.9, 1), (0.0, 2)])
def test_a_bad_sample_costs_time_and_nothing_else(factor: float, num_passes: int) -> None:
    compressor, rest_D = Misled(), aligned_zeros(SIZE)
    compressor.factor = factor
    gradient_D = next(stream("independent"))
    picked = compressor.select(gradient_D, np.zeros_like(gradient_D), rest_D, 0.01, Key(3, 0, 0))
    assert compressor.num_passes == num_passes
    assert 1800 <= picked.count <= 2200
    assert energy(picked.values_K) == pytest.approx(best_elements(gradient_D, picked.count), rel=1e-6)
    np.testing.assert_array_equal(picked.dense() + rest_D, gradient_D)


@pytest.mark.parametrize("name", ["topk", "threshold-v", "threshold-v16"])
def test_one_pass_is_nearly_always_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compressor, rest_D = COMPRESSORS.get(name)(), aligned_zeros(SIZE)
    counts: list[int] = []
    pick = compressor._pick_above
    monkeypatch.setattr(compressor, "_pick_above", lambda *arguments: counts.append(pick(*arguments)) or counts[-1])
    gradient_D = next(stream("stationary"))
    for step in range(100):
        compressor.select(gradient_D, np.zeros_like(gradient_D), rest_D, 0.01, Key(3, step, 0))
    assert 100 <= len(counts) <= 105


def test_scratch_is_kept_between_choices() -> None:
    compressor, rest_D = COMPRESSORS.get("threshold-v16")(), aligned_zeros(SIZE)
    assert isinstance(compressor, ThresholdCompressor)
    gradient_D = next(stream("independent"))
    compressor.select(gradient_D, np.zeros_like(gradient_D), rest_D, 0.02, Key(3, 0, 0))
    before = compressor._places, compressor._values
    compressor.select(gradient_D, np.zeros_like(gradient_D), rest_D, 0.01, Key(3, 1, 0))
    assert (compressor._places, compressor._values) == before or compressor._places is before[0]


def test_the_largest_are_found_among_equals() -> None:
    scores = np.array([1, 3, 2, 3, 2, 2], dtype=np.float32)
    assert are_largest(scores, 4).tolist() == [False, True, True, True, True, False]
    assert are_largest(scores, 6).all()
    assert are_largest(scores, 9).all()

"""What every compressor promises, with every quantiser behind it: each registered pair runs all of this unasked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shade.errors import ConfigError, NonFiniteGradientError
from shade.gradient._compress.compressor import COMPRESSORS, Key, Sparse, wanted_count
from shade.gradient._compress.correction import AdamCorrection, Correction, MomentumCorrection
from shade.gradient._compress.error_feedback import ErrorFeedback
from shade.gradient._compress.quantiser import QUANTISERS
from shade.gradient._kernels.lines import aligned_zeros
from shade.types import Floats

every_compressor = pytest.mark.parametrize("name", list(COMPRESSORS))
every_correction = pytest.mark.parametrize("correction", [MomentumCorrection(0.9), AdamCorrection()], ids=type)
every_quantiser = pytest.mark.parametrize("quantiser", list(QUANTISERS))
SIZES = (0, 1, 7, 16, 100, 4099, 70_001)
DENSITIES = (0.001, 0.01, 0.3, 1.0)
OFF = {"int2": 0.75}
"""The largest error in parts of the largest magnitude, where it is not a step of int8."""
LARGE = 70_001
"""Beyond the size below which thresholds are exact, and no multiple of anything."""


def gradients(size: int, num_steps: int, seed: int = 0) -> list[Floats]:
    """Rows of different scale, plus a part that stays from step to step."""
    rng = np.random.default_rng(seed)
    scale_D = np.exp(rng.standard_normal(size // 97 + 1)).repeat(97)[:size].astype(np.float32)
    lasting_D = rng.standard_normal(size).astype(np.float32) * scale_D * np.float32(0.3)
    return [lasting_D + rng.standard_normal(size).astype(np.float32) * scale_D for _ in range(num_steps)]


def feedback(name: str, quantiser: str, size: int, **settings: Any) -> ErrorFeedback:
    """A bucket's memory, empty."""
    return ErrorFeedback(size, COMPRESSORS.get(name)(), QUANTISERS.get(quantiser)(), **settings)


def equal(left: Sparse, right: Sparse) -> bool:
    """Whether two are the same, bit for bit."""
    return left.size == right.size and all(
        a.tobytes() == b.tobytes() for a, b in ((left.indices_K, right.indices_K), (left.values_K, right.values_K))
    )


def imbalance(fed: Floats, sent: Floats, kept: Floats) -> float:
    """By how much sent and kept together differ from what was fed, relative to the largest of them."""
    scale = max(1.0, float(np.abs(fed).max(initial=0)), float(np.abs(kept).max(initial=0)))
    return float(np.abs(fed - sent - kept).max(initial=0)) / scale


@every_compressor
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_picked_and_what_is_left_are_the_sum(name: str, size: int, density: float) -> None:
    gradient_D, residual_D = gradients(size, 2)
    before = gradient_D.copy(), residual_D.copy()
    rest_D = aligned_zeros(size)
    rest_D[:] = np.nan
    picked = COMPRESSORS.get(name)().select(gradient_D, residual_D, rest_D, density, Key(1, 2, 3))
    np.testing.assert_array_equal(gradient_D, before[0])
    np.testing.assert_array_equal(residual_D, before[1])
    assert picked.indices_K.dtype == np.uint32
    assert picked.values_K.dtype == np.float32
    assert (np.diff(picked.indices_K.astype(np.int64)) > 0).all()
    assert picked.size == size
    assert not rest_D[picked.indices_K].any()
    np.testing.assert_array_equal(picked.dense() + rest_D, gradient_D + residual_D)


@every_compressor
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("size", SIZES)
def test_about_as_many_as_wanted_are_picked(name: str, size: int, density: float) -> None:
    gradient_D, residual_D = gradients(size, 2)
    picked = COMPRESSORS.get(name)().select(gradient_D, residual_D, aligned_zeros(size), density, Key(1, 2, 3))
    unit = 16 if name == "threshold-v16" else 1
    wanted = min(size, unit * wanted_count(-(-size // unit), density))
    assert 0.9 * wanted <= picked.count + unit - 1
    assert picked.count <= 1.1 * wanted


@every_compressor
@every_quantiser
@pytest.mark.parametrize("size", SIZES)
def test_sent_and_kept_make_up_what_came_in(name: str, quantiser: str, size: int) -> None:
    memory = feedback(name, quantiser, size)
    fed, sent = np.zeros(size), np.zeros(size)
    for step, gradient_D in enumerate(gradients(size, 30)):
        picked = memory.compress(gradient_D, 0.02, Key(5, step, 0))
        fed += gradient_D
        if step % 7 == 3:
            memory.absorb(picked)  # the link was down
        elif step % 7 == 5:
            memory.undo()  # a rank had a NaN
            fed -= gradient_D
        else:
            sent += picked.dense()
    assert imbalance(fed, sent, memory.residual_D) < 1e-5


@every_compressor
@every_quantiser
@every_correction
def test_what_follows_a_restore_is_what_would_have_followed(name: str, quantiser: str, correction: Correction) -> None:
    memory = feedback(name, quantiser, LARGE, correction=correction)
    steps = gradients(LARGE, 8)
    for step, gradient_D in enumerate(steps[:4]):
        memory.compress(gradient_D, 0.01, Key(5, step, 0))
    state = {key: tensor.clone() for key, tensor in memory.state_dict().items()}
    restored = feedback(name, quantiser, LARGE, correction=correction)
    restored.load_state_dict(state)
    for step, gradient_D in enumerate(steps[4:], 4):
        theirs, ours = (each.compress(gradient_D, 0.01, Key(5, step, 0)) for each in (memory, restored))
        assert equal(theirs, ours)
    np.testing.assert_array_equal(memory.residual_D, restored.residual_D)


@every_compressor
@every_quantiser
@every_correction
@pytest.mark.parametrize("size", [100, LARGE])
def test_a_step_that_is_undone_has_not_been(name: str, quantiser: str, size: int, correction: Correction) -> None:
    memory = feedback(name, quantiser, size, correction=correction)
    first, second = gradients(size, 2)
    memory.compress(first, 0.01, Key(5, 0, 0))
    before = {key: tensor.clone() for key, tensor in memory.state_dict().items()}
    picked = memory.compress(second, 0.01, Key(5, 1, 0))
    memory.undo()
    for key, tensor in memory.state_dict().items():
        assert torch.equal(tensor, before[key])
    with pytest.raises(ConfigError, match=r"undo each compress\(\) at most once"):
        memory.undo()
    assert equal(memory.compress(second, 0.01, Key(5, 1, 0)), picked)


@every_compressor
@every_quantiser
def test_a_rank_that_leaves_hands_on_what_it_kept(name: str, quantiser: str) -> None:
    leaving, staying = feedback(name, quantiser, LARGE), feedback(name, quantiser, LARGE)
    fed, sent = np.zeros(LARGE), np.zeros(LARGE)
    for seed, memory in enumerate((leaving, staying)):
        for step, gradient_D in enumerate(gradients(LARGE, 3, seed)):
            fed += gradient_D
            sent += memory.compress(gradient_D, 0.01, Key(5, step, 0)).dense()
    staying.merge_from(leaving.state_dict())
    assert imbalance(fed, sent, staying.residual_D) < 1e-5


@every_compressor
@every_correction
@pytest.mark.parametrize("size", [3, 100, LARGE])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_changes_nothing(name: str, size: int, bad: float, correction: Correction) -> None:
    memory = feedback(name, "bf16", size, correction=correction)
    first, second = gradients(size, 2)
    memory.compress(first, 0.01, Key(5, 0, 0))
    before = {key: tensor.clone() for key, tensor in memory.state_dict().items()}
    for place in (0, size // 2, size - 1):
        spoilt = second.copy()
        spoilt[place] = bad
        with pytest.raises(NonFiniteGradientError, match="NaN or infinity"):
            memory.compress(spoilt, 0.01, Key(5, 1, 0))
        for key, tensor in memory.state_dict().items():
            assert torch.equal(tensor, before[key])
        with pytest.raises(ConfigError, match="undo"):
            memory.undo()
    memory.compress(second, 0.01, Key(5, 1, 0))


@every_compressor
def test_nothing_but_bad_values_is_refused_too(name: str) -> None:
    memory = feedback(name, "bf16", LARGE)
    with pytest.raises(NonFiniteGradientError):
        memory.compress(np.full(LARGE, np.nan, dtype=np.float32), 0.01, Key(5, 0, 0))
    assert not memory.residual_D.any()


@every_compressor
def test_a_key_names_a_choice(name: str) -> None:
    memories = [feedback(name, "none", LARGE) for _ in range(3)]
    (gradient_D,) = gradients(LARGE, 1)
    keys = Key(5, 1, 0), Key(5, 1, 0), Key(5, 2, 0)
    same, again, other = (memory.compress(gradient_D, 0.01, key) for memory, key in zip(memories, keys, strict=True))
    assert equal(same, again)
    assert name != "random-k" or not equal(same, other)


@every_compressor
@pytest.mark.parametrize("size", [0, 5, LARGE])
def test_no_gradient_is_no_trouble(name: str, size: int) -> None:
    memory = feedback(name, "int8", size)
    for step in range(2):
        picked = memory.compress(np.zeros(size, dtype=np.float32), 0.01, Key(5, step, 0))
        assert not picked.values_K.any()
    assert not memory.residual_D.any()


@every_compressor
@pytest.mark.parametrize("size", [5, 4099, LARGE])
def test_full_density_keeps_nothing(name: str, size: int) -> None:
    memory = feedback(name, "none", size)
    (gradient_D,) = gradients(size, 1)
    np.testing.assert_array_equal(memory.compress(gradient_D, 1.0, Key(5, 0, 0)).dense(), gradient_D)
    assert not memory.residual_D.any()


@every_compressor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_any_width_are_taken(name: str, dtype: torch.dtype) -> None:
    narrow, wide = feedback(name, "none", LARGE), feedback(name, "none", LARGE)
    (array_D,) = gradients(LARGE, 1)
    gradient_D = torch.from_numpy(array_D).to(dtype)
    expected = wide.compress(gradient_D.float().numpy(), 0.01, Key(5, 0, 0))
    assert equal(narrow.compress(gradient_D, 0.01, Key(5, 0, 0)), expected)
    np.testing.assert_array_equal(narrow.residual_D, wide.residual_D)


@every_compressor
@pytest.mark.parametrize(
    ("gradient_D", "density", "complaint"),
    [
        (np.zeros(8, np.float32), 0.0, r"density in \(0, 1\], got 0.0"),
        (np.zeros(8, np.float32), 1.01, r"density in \(0, 1\]"),
        (np.zeros(8, np.float32), float("nan"), r"density in \(0, 1\]"),
        (np.zeros(9, np.float32), 0.5, "9 elements"),
        (np.zeros(8, np.float64), 0.5, "flat contiguous float32 gradient"),
        (np.zeros(16, np.float32)[::2], 0.5, "flat contiguous float32 gradient"),
        (np.zeros((2, 4), np.float32), 0.5, "flat contiguous float32 gradient"),
        (torch.zeros(8, dtype=torch.float64), 0.5, "float32, bfloat16 or float16"),
        (torch.zeros(9, dtype=torch.bfloat16), 0.5, "8 elements"),
        (torch.zeros(16)[::2], 0.5, "flat contiguous float32 gradient"),
    ],
)
def test_a_bad_argument_is_named_and_changes_nothing(
    name: str, gradient_D: torch.Tensor | Floats, density: float, complaint: str
) -> None:
    memory = feedback(name, "none", 8)
    memory.compress(np.arange(8, dtype=np.float32), 0.2, Key(5, 0, 0))
    before = memory.residual_D.copy()
    with pytest.raises(ConfigError, match=complaint):
        memory.compress(gradient_D, density, Key(5, 1, 0))
    np.testing.assert_array_equal(memory.residual_D, before)


@every_quantiser
def test_what_was_decoded_encodes_to_itself(quantiser: str) -> None:
    codec = QUANTISERS.get(quantiser)()
    for count in (0, 1, 255, 256, 257, 5000):
        values_K = np.random.default_rng(count).standard_normal(count).astype(np.float32) * np.float32(1e-3)
        data = codec.encode(values_K)
        assert data.dtype == np.uint8
        assert len(data) == codec.num_bytes(count)
        seen_K = codec.decode(data, count)
        assert seen_K.dtype == np.float32
        assert np.abs(seen_K - values_K).max(initial=0) <= np.abs(values_K).max(initial=0) * OFF.get(quantiser, 1 / 127)
        np.testing.assert_array_equal(codec.decode(codec.encode(seen_K), count), seen_K)


@every_quantiser
def test_values_of_any_size_stay_finite(quantiser: str) -> None:
    codec = QUANTISERS.get(quantiser)()
    ends = np.finfo(np.float32)
    values_K = np.array([ends.max, ends.min, ends.tiny, ends.smallest_subnormal, -0.0, 1.0], dtype=np.float32)
    for some_K in (values_K, values_K[2:4], values_K[3:5]):
        seen_K = codec.decode(codec.encode(some_K), len(some_K))
        assert np.isfinite(seen_K).all()
        lost_K = np.abs(seen_K.astype(np.float64) - some_K)
        share = OFF.get(quantiser, 1 / 127)
        assert (lost_K <= max(np.abs(some_K.astype(np.float64)).max() * share, ends.tiny)).all()

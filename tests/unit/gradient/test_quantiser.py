"""Each quantiser's result, bit for bit, and its error for bytes that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shade.errors import PayloadError
from shade.gradient._compress.quantiser import QUANTISERS, Quantiser


def codec(name: str) -> Quantiser:
    """One by name."""
    return QUANTISERS.get(name)()


def through(name: str, values: list[float]) -> list[float]:
    """What a receiver sees."""
    values_K = np.array(values, dtype=np.float32)
    return [float(value) for value in codec(name).decode(codec(name).encode(values_K), len(values_K))]


def test_bf16_rounds_to_the_nearest_and_ties_to_even() -> None:
    step = 2.0**-7
    assert through("bf16", [1 + step * 0.49, 1 + step * 0.51]) == [1.0, 1 + step]
    assert through("bf16", [1 + step * 0.5, 1 + step * 1.5, -1 - step * 0.5]) == [1.0, 1 + 2 * step, -1.0]
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.standard_normal(10_000, dtype=np.float32))
    assert through("bf16", values.tolist()) == values.to(torch.bfloat16).float().tolist()


def test_bf16_ends_at_its_largest_value() -> None:
    largest = float(torch.finfo(torch.bfloat16).max)
    assert through("bf16", [3.4e38, -3.4e38]) == [largest, -largest]


def test_int8_has_a_scale_for_each_block() -> None:
    values = [127.0, 1.4, -2.5, 0.4] + [0.0] * 252 + [1.27, -0.635, 0.004]
    seen = through("int8", values)
    assert seen[:4] == [127.0, 1.0, -2.0, 0.0]
    assert seen[256:] == pytest.approx([1.27, -0.64, 0.0], abs=1e-6)


def test_int2_has_two_magnitudes_for_each_block() -> None:
    values = [1.0, -1.0, 3.0, -3.0] * 16 + [0.5] * 3
    assert through("int2", values) == values
    assert through("int2", [1.0, -2.0, 30.0, -40.0, 50.0]) == [1.5, -1.5, 40.0, -40.0, 40.0]
    assert through("int2", [0.0, 0.0, -7.0]) == [0.0, 0.0, -7.0]


def test_int2_is_as_near_as_two_magnitudes_can_be() -> None:
    magnitudes = np.sort(np.random.default_rng(0).laplace(size=64).astype(np.float32) ** 2)
    cuts = [(magnitudes[:cut], magnitudes[cut:]) for cut in range(1, 64)]
    least = min(sum(float(((part - part.mean()) ** 2).sum()) for part in cut) for cut in cuts)
    signs = np.where(np.arange(64) % 3, 1, -1).astype(np.float32)
    seen = np.array(through("int2", (magnitudes * signs).tolist()))
    assert float(((seen - magnitudes * signs) ** 2).sum()) < 1.01 * least


def test_bytes_as_promised() -> None:
    assert [codec(name).num_bytes(1000) for name in ("none", "bf16", "int8", "int2")] == [4000, 2000, 1016, 314]


@pytest.mark.parametrize("name", list(QUANTISERS))
def test_bytes_of_another_count_are_refused(name: str) -> None:
    data = codec(name).encode(np.ones(300, dtype=np.float32))
    share = 300 // len(data) + 1  # values that may share a byte
    for count in (300 - share, 300 + share, 0, -1):
        with pytest.raises(PayloadError, match="sender and receiver differ"):
            codec(name).decode(data, count)
    with pytest.raises(PayloadError):
        codec(name).decode(data[:-1], 300)


@pytest.mark.parametrize("name", list(QUANTISERS))
def test_bytes_may_lie_anywhere_and_may_be_read_only(name: str) -> None:
    values_K = np.linspace(-1, 1, 300).astype(np.float32)
    data = codec(name).encode(values_K)
    odd = np.concatenate([np.zeros(1, np.uint8), data])[1:]
    odd.flags.writeable = False
    seen_K = codec(name).decode(odd, 300)
    np.testing.assert_array_equal(seen_K, codec(name).decode(data, 300))
    seen_K[:] = 0
    assert (odd == data).all()

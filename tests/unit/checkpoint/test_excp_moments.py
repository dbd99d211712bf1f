"""Which items ExCP keeps, and whose moments are whose."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shade.checkpoint._capture.flatten import flatten
from shade.checkpoint._capture.layout import TensorSpec, bytes_of, lay_out
from shade.checkpoint._codecs.excp import ALPHA, BETA, Survey

Arrays = dict[str, npt.NDArray[np.float32]]


def survey(state: dict[str, object], before: dict[str, object]) -> tuple[Survey, Arrays, Arrays]:
    tree, tensors = flatten(state)
    _, old = flatten(before)
    layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, 0, 1)
    data, base = (
        torch.cat([bytes_of(each[name].contiguous()) for name in layout.entries]).numpy() for each in (tensors, old)
    )
    arrays = [{name: tensor.numpy().reshape(-1) for name, tensor in each.items()} for each in (tensors, old)]
    return Survey(memoryview(data.data), memoryview(base.data), layout.entries, tree), *arrays  # type: ignore[return-value]


def network(seed: int, shapes: list[tuple[int, ...]]) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"layer{number}.weight": torch.randn(shape, generator=generator) for number, shape in enumerate(shapes)}
    moments = {
        number: {
            "step": torch.tensor(float(seed)),
            "exp_avg": torch.randn(shape, generator=generator) * 1e-3,
            "exp_avg_sq": torch.rand(shape, generator=generator) * 10.0 ** -(2 + 4 * number),
        }
        for number, shape in enumerate(shapes)
    }
    return {"model": weights, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}}


def test_what_is_kept_is_what_the_paper_keeps() -> None:
    shapes = [(64, 32), (50, 50)]
    found, now, before = survey(network(1, shapes), network(0, shapes))
    for number in range(2):
        weight = f"model/layer{number}.weight"
        first, second = (f"optimizer/state/{number}/{kind}" for kind in ("exp_avg", "exp_avg_sq"))
        change = np.abs(now[weight] - before[weight])
        steep = min(2.5, ALPHA / np.sqrt(now[second].mean(dtype=np.float64)))
        expected = change > np.median(change) * steep
        assert np.array_equal(found.kept[weight], expected)
        large = np.abs(now[first]) > BETA * np.abs(now[first]).mean(dtype=np.float64)
        assert np.array_equal(found.kept[first], expected & large)
        assert np.array_equal(found.kept[second], expected & large)
        assert (found.is_moment[weight], found.is_moment[first], found.is_moment[second]) == (False, True, True)
    assert "optimizer/state/0/step" not in found.kept, "what is small is exact"


def test_moments_find_their_weights_by_order_and_shape() -> None:
    """Buffers lie between parameters, and shapes repeat."""
    shapes = [(40, 40), (40, 50), (40, 40)]
    state, before = network(1, shapes), network(0, shapes)
    for each in (state, before):
        weights = each["model"]
        assert isinstance(weights, dict)
        each["model"] = {
            "layer0.weight": weights["layer0.weight"],
            "layer0.running": torch.ones(40, 41),
            "layer1.weight": weights["layer1.weight"],
            "layer2.weight": weights["layer2.weight"],
        }
    found, now, _ = survey(state, before)
    second = now["optimizer/state/2/exp_avg_sq"].mean(dtype=np.float64)
    assert ALPHA / np.sqrt(second) > 2.5, "the third layer's second moment is small: the steepest rule"
    kept = [found.kept[f"model/layer{number}.weight"].mean() for number in range(3)]
    assert kept[0] > kept[1] > kept[2] > 0


def test_a_shard_without_weights_keeps_large_moments_and_one_without_moments_large_changes() -> None:
    shapes = [(64, 32)]
    state, before = network(1, shapes), network(0, shapes)
    alone, now, _ = survey({"optimizer": state["optimizer"]}, {"optimizer": before["optimizer"]})
    first = now["optimizer/state/0/exp_avg"]
    expected = np.abs(first) > BETA * np.abs(first).mean(dtype=np.float64)
    assert np.array_equal(alone.kept["optimizer/state/0/exp_avg"], expected)
    weights, now, then = survey({"model": state["model"]}, {"model": before["model"]})
    change = np.abs(now["model/layer0.weight"] - then["model/layer0.weight"])
    assert np.array_equal(weights.kept["model/layer0.weight"], change > 2.5 * np.median(change))

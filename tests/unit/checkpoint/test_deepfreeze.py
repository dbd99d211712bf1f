"""DeepFreeze copies layer by layer in the threads of a pool, and checks the copy at the end."""

from __future__ import annotations

import pytest
import torch

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._capture.layout import TensorSpec, bytes_of, lay_out
from shade.checkpoint._strategies.deepfreeze import DeepFreeze, layers
from shade.errors import TornSnapshotError


def test_a_layer_is_a_module_or_one_parameters_state() -> None:
    names = [
        *("model/h.0.attn.bias", "model/h.0.attn.weight", "model/h.0.mlp.weight", "model/norm"),
        *("optimizer/state/0/exp_avg", "optimizer/state/0/exp_avg_sq", "optimizer/state/1/exp_avg"),
    ]
    found = layers(names)
    assert [len(each) for each in found] == [2, 1, 1, 2, 1]
    assert [name for each in found for name in each] == names
    assert layers([]) == []


def copying_of(live: dict[str, torch.Tensor]) -> tuple[Copying, torch.Tensor]:
    layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in live.items()}, 0, 1)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    return Copying(live, layout.entries, buffer, frozenset(live)), buffer


def test_all_layers_are_copied_by_a_pool_and_checked_at_the_end() -> None:
    live = {f"model/layer.{number}.weight": torch.randn(1000 + number) for number in range(50)}
    copying, buffer = copying_of(live)
    strategy = DeepFreeze()
    copied = strategy.begin(copying)
    strategy.wait()
    assert copied.done()
    expected = torch.cat([bytes_of(live[name]) for name in sorted(live)])
    assert torch.equal(buffer, expected)
    strategy.close()
    strategy.close()


def test_every_threads_copy_is_checked_for_changes() -> None:
    live = {f"model/layer.{number}.weight": torch.randn(1000) for number in range(20)}
    copying, _ = copying_of(live)
    live["model/layer.7.weight"].add_(1)
    strategy = DeepFreeze()
    strategy.begin(copying)
    with pytest.raises(TornSnapshotError, match=r"model/layer\.7\.weight"):
        strategy.wait()
    strategy.close()

"""A sampler gets the indices that a loader has put on a device without reading them back.

The meta device stands in for a GPU: it has no content, so whatever reads it back fails.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from shade import ShadeDataset, ShadeLoader, ShadeSampler
from shade.data._loader.batch_parts import on_device
from shade.data._source.host_copy import host_copy

META = torch.device("meta")


def moved(*tensors: torch.Tensor) -> list[torch.Tensor]:
    (batch,) = on_device([list(tensors)], META)
    return list(batch)


def test_weights_and_reports_read_nothing_back() -> None:
    sampler = ShadeSampler(range(64), batch_size=8, seed=0)
    sampler.total_steps(4)  # read, so that the shorter epoch is no surprise
    weighed = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        positions = torch.tensor(list(sampler)).split(8)
        for indices, on_meta in zip(positions, (moved(each)[0] for each in positions), strict=True):
            weights = sampler.weights(on_meta)
            assert (weights.device, weights.shape, weights.dtype) == (META, indices.shape, torch.float32)
            weighed.append(bool((sampler.weights(indices) != 1).any()))
            sampler.report(on_meta, indices / 64)
    sampler.set_epoch(3)
    assert any(weighed), "no weight was read"
    assert np.isfinite(sampler.scores()).all()
    sampler.close()


def test_what_was_changed_or_computed_has_no_copy() -> None:
    on_meta, labels, losses = moved(torch.arange(4), torch.zeros(2, 2, dtype=torch.int64), torch.ones(4))
    assert host_copy(on_meta).tolist() == [0, 1, 2, 3]
    assert host_copy(on_meta[:2]).device == host_copy(labels).device == host_copy(losses).device == META
    on_meta += 1
    assert host_copy(on_meta) is on_meta
    with torch.inference_mode():
        assert host_copy(moved(torch.arange(4))[0]).device == META
    on_host = torch.arange(4)
    assert host_copy(on_host) is on_host


@pytest.mark.parametrize(("device", "pins"), [(None, False), ("cpu", False), ("cuda", True), ("cuda:1", True)])
def test_a_loader_for_a_gpu_pins_its_batches(device: str | None, pins: bool) -> None:
    with ShadeDataset(TensorDataset(torch.arange(8.0)), cache="memory://", working_set_fraction=0.5) as dataset:
        assert ShadeLoader(dataset, 4, num_workers=0, device=device).pin_memory is pins

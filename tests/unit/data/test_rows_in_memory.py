"""Labels that training changes are not served from the cache in silence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from shade import ShadeDataset
from shade.errors import ConfigError

N = 200


class Pseudo(Dataset[Any]):
    def __init__(self, labels: Any) -> None:
        self.images, self.labels = torch.randn(N, 64), labels
        self.num_reads = np.zeros(N, np.int64)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.num_reads[index] += 1
        return self.images[index], int(self.labels[index])


@pytest.mark.parametrize("labels", [np.zeros(N, np.int64), torch.zeros(N), [0] * N], ids=["array", "tensor", "list"])
@pytest.mark.parametrize("is_part", [False, True])
def test_a_label_that_changes_is_refused_by_name(labels: Any, is_part: bool) -> None:
    data = Pseudo(labels)
    dataset = ShadeDataset(
        Subset(data, range(100, N)) if is_part else data, cache="memory://", working_set_fraction=1.0
    )
    for _ in range(2):
        dataset.__getitems__(range(100))
    at = 137 if is_part else 37
    data.labels[at] = 1
    dataset.__getitems__([36, 38])
    with pytest.raises(ConfigError, match=r"index 37 of .*keep labels that change outside"):
        dataset.__getitems__([36, 37])
    data.labels[at] = 0
    dataset.close()


def test_counters_that_change_with_each_read_are_left_alone() -> None:
    data = Pseudo([0] * N)
    dataset = ShadeDataset(data, cache="memory://", working_set_fraction=1.0)
    for _ in range(4):
        dataset.__getitems__(range(N))
    # Each sample once, the hits that are compared in any case, and as many as show that the counter says nothing.
    assert N <= data.num_reads.sum() <= N + 12 + 2 * 32 + N
    before = data.num_reads.sum()
    dataset.__getitems__(range(N))
    assert data.num_reads.sum() - before <= 1
    dataset.close()


def test_the_cure_works() -> None:
    data = Pseudo([0] * N)
    dataset = ShadeDataset(data, cache="memory://", working_set_fraction=1.0)
    labels = torch.zeros(N, dtype=torch.int64)
    for epoch in range(3):
        indices = torch.tensor([index for _, _, index in dataset.__getitems__(range(N))])
        assert labels[indices].unique().tolist() == [epoch]
        labels += 1
    dataset.close()

"""Read through the cache in a Grain pipeline.

    pip install torch-shade grain
    python examples/grain_source.py

`ShadeSource` is a `RandomAccessDataSource` over a ShadeDataset. Grain shuffles, batches and remembers its place; shade
caches. The first samples that are read stay in the cache, up to ``working_set_fraction`` of them.

What to know: Grain draws the order, so there is no importance sampling and no plan for the cache. Worker processes
count their hits for themselves; ``dataset.stats()`` has those of this process.
"""

from __future__ import annotations

from typing import Any

import grain
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from shade import ShadeDataset


def make_data(num_samples: int = 200) -> TensorDataset:
    """Points in four classes, and some noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_samples) % 4
    points = F.one_hot(labels, 16).float() * 2 + torch.randn(num_samples, 16, generator=generator)
    return TensorDataset(points, labels)


class ShadeSource:
    """Grain's `RandomAccessDataSource` over a ShadeDataset."""

    def __init__(self, dataset: ShadeDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns one sample, as arrays that Grain stacks into batches; Grain calls it in many threads."""
        point, label, number = self._dataset[index]
        return {"point": np.asarray(point), "label": np.int64(label), "index": np.int64(number)}

    def __repr__(self) -> str:
        """Grain compares this text when it restores a state: it names the data, and not the hits so far."""
        return f"ShadeSource(num_samples={len(self)})"


def main() -> None:
    """Goes through the data three times, and again from the middle of the second."""
    dataset = ShadeDataset(make_data(), cache="local://", working_set_fraction=0.5)
    batches = grain.MapDataset.source(ShadeSource(dataset)).seed(0).shuffle().repeat(3).batch(8).to_iter_dataset()
    iterator = iter(batches)
    seen = [next(iterator)["index"].tolist() for _ in range(33)]
    state = iterator.get_state()
    rest = [batch["index"].tolist() for batch in iterator]
    again = iter(batches)
    again.set_state(state)
    same = rest == [batch["index"].tolist() for batch in again]
    print(f"{len(seen) + len(rest)} batches; the same samples after the stop: {same}")
    print(f"share of the samples from the cache: {dataset.stats()['hit_ratio']:.0%}")
    dataset.close()


if __name__ == "__main__":
    main()

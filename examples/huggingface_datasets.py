"""Read through the cache in a Hugging Face data set, and a Hugging Face data set through the cache.

    pip install 'torch-shade[ecosystem]'
    python examples/huggingface_datasets.py

Where the pipeline takes samples by index from shade, `through_cache` gives a `datasets.Dataset` of sample indices whose
``with_transform`` reads them through the cache. It can be shuffled, selected and split, and the Trainer and DataLoader
take it as any other. A batch is one round to the cache and one to the origin.

The other way round, `ShadeDataset` takes a Hugging Face data set as it is. Leave ``with_transform`` out there, because
its result would be cached: give the transform to `ShadeDataset`.

What to know: with the sampler of the Trainer or of DataLoader's ``shuffle=True`` there is no importance sampling and
no plan for the cache: the first samples that are read stay in it. A `ShadeSampler` of the same ShadeDataset has both.
"""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader

from shade import ShadeDataset, ShadeSampler


def make_pictures(num_samples: int = 200) -> datasets.Dataset:
    """Stands for a data set that is slow to read."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (num_samples, 3, 8, 8), generator=generator, dtype=torch.uint8)
    rows = {"picture": list(pictures.numpy()), "label": [number % 4 for number in range(num_samples)]}
    return datasets.Dataset.from_dict(rows).with_format("numpy")


class ReadThroughCache:
    """Turns rows of indices into rows of samples, for ``with_transform``."""

    def __init__(self, dataset: ShadeDataset) -> None:
        self._dataset = dataset

    def __call__(self, rows: dict[str, list[int]]) -> dict[str, list[Any]]:
        """Returns columns."""
        samples, indices = zip(*self._dataset.__getitems__(rows["index"]), strict=True)
        columns = {name: [sample[name] for sample in samples] for name in samples[0]}
        return columns | {"index": list(indices)}


def through_cache(dataset: ShadeDataset) -> datasets.Dataset:
    """Returns a Hugging Face data set of all samples."""
    indices = datasets.Dataset.from_dict({"index": range(len(dataset))})
    return indices.with_transform(ReadThroughCache(dataset))


def scaled(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform, which runs after the cache."""
    return sample | {"picture": np.float32(sample["picture"]) / 255}


def main() -> None:
    """Goes through the data twice, in Hugging Face's order and in the sampler's."""
    pictures = make_pictures()
    dataset = ShadeDataset(pictures, cache="local://", working_set_fraction=0.5, transform=scaled)
    rows = through_cache(dataset)
    shuffled = DataLoader(rows.shuffle(seed=0), batch_size=8)
    seen = [index for _ in range(2) for batch in shuffled for index in batch["index"].tolist()]
    print(f"{len(seen)} samples, each twice: {sorted(seen) == sorted([*range(200)] * 2)}")
    sampler = ShadeSampler(dataset, batch_size=8, mode="uniform")
    for batch in DataLoader(rows, batch_size=8, sampler=sampler):
        expected = [scaled(pictures[index])["picture"] for index in batch["index"].tolist()]
        same = np.array_equal(batch["picture"].numpy(), expected)
    print(f"the pictures are those of the data set: {same}")
    print(f"share of the samples from the cache: {dataset.stats()['hit_ratio']:.0%}")
    sampler.close()
    dataset.close()


if __name__ == "__main__":
    main()

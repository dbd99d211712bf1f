"""Any map-style data set will do: here waveforms of different lengths from a `datasets.Dataset`, padded per batch.

    pip install 'torch-shade[ecosystem]'
    python examples/audio.py

What the data set returns is cached through a codec that knows tensors, arrays, images, numbers, text, and tuples, lists
and dicts of them, without pickle. Put what is random (noise, crops of time) into ``transform=``: it runs after the
cache, on every use anew; what is costly and fixed (decoding, resampling) belongs into the data set, before it.
"""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from shade import ShadeDataset, ShadeSampler

BATCH, RATE = 8, 8000


def make_waveforms(num_samples: int = 96) -> datasets.Dataset:
    """Tones of 30 to 60 ms at one of three pitches."""
    draw = np.random.default_rng(0)
    labels = [number % 3 for number in range(num_samples)]
    times = [np.arange(draw.integers(240, 480)) / RATE for _ in labels]
    waves = [
        np.sin(2 * np.pi * (300 + 400 * label) * t).astype(np.float32) for label, t in zip(labels, times, strict=True)
    ]
    return datasets.Dataset.from_dict({"wave": waves, "label": labels}).with_format("numpy")


def add_noise(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform: after the cache, another one at every use."""
    wave = torch.as_tensor(np.array(sample["wave"], dtype=np.float32))
    return {"wave": wave + 0.05 * torch.randn(len(wave)), "label": int(sample["label"])}


def collate(batch: list[tuple[dict[str, Any], int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pads with silence."""
    rows, indices = zip(*batch, strict=True)
    waves = torch.nn.utils.rnn.pad_sequence([row["wave"] for row in rows], batch_first=True)
    return waves, torch.tensor([row["label"] for row in rows]), torch.tensor(indices)


def features(waves: torch.Tensor) -> torch.Tensor:
    """How loud each pitch is."""
    return torch.log1p(torch.fft.rfft(waves, n=512).abs())


def train(cache: str = "local://", epochs: int = 4, workers: int = 0) -> tuple[float, float]:
    """Returns the last epoch's accuracy and hit ratio."""
    dataset = ShadeDataset(make_waveforms(), cache=cache, working_set_fraction=0.5, transform=add_noise)
    sampler = ShadeSampler(dataset, batch_size=BATCH, seed=0, epochs=epochs)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=collate, num_workers=workers)
    torch.manual_seed(0)
    model = torch.nn.Linear(257, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    assert dataset.cache is not None
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        before, right, used = dataset.cache.residency.totals(), 0, 0
        for waves, labels, indices in loader:
            logits = model(features(waves))
            losses_B = F.cross_entropy(logits, labels, reduction="none")
            (losses_B * sampler.weights(indices)).mean().backward()
            sampler.report(indices, losses_B)
            optimizer.step()
            optimizer.zero_grad()
            right, used = right + int((logits.argmax(1) == labels).sum()), used + len(labels)
    counted = dataset.cache.residency.totals() - before
    del loader
    sampler.close()
    dataset.close()
    return right / used, counted["hits"] / counted["samples"]


def main() -> None:
    """Trains four epochs of tones."""
    accuracy, hit_ratio = train()
    print(f"accuracy {accuracy:.0%}, hits {hit_ratio:.0%} with a cache of half the data")


if __name__ == "__main__":
    main()

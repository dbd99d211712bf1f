"""Train in a loop of your own with Hugging Face Accelerate.

    pip install 'torch-shade[ecosystem]'
    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py redis://127.0.0.1:6379

`AccelerateLoader` saves training between two steps and resumes it. It takes a loader that `prepare` made, too.

One thing to know: with a `ShadeSampler`, give ``accelerator.prepare`` the model and the optimizer, and *not the
loader*. Accelerate would deal its batches out to the ranks, and the sampler has done that already; on two ranks half of
the data would never be seen. (It is told you: the second reported batch is not the one that the sampler handed out.)
Make the sampler after the Accelerator, which is when the ranks have met.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from shade import ShadeDataset, ShadeSampler
from shade.integrations.accelerate import AccelerateLoader

BATCH = 8


def make_data(num_samples: int = 200) -> TensorDataset:
    """Points in four classes, and some noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_samples) % 4
    points = F.one_hot(labels, 16).float() * 2 + torch.randn(num_samples, 16, generator=generator)
    return TensorDataset(points, labels)


def train(
    cache: str = "local://", epochs: int = 3, workers: int = 0, folder: str | None = None
) -> tuple[list[list[int]], torch.nn.Module]:
    """One rank's training; returns the sample indices of each step, and the model."""
    accelerator = Accelerator(cpu=True)
    dataset = ShadeDataset(make_data(), cache=cache, working_set_fraction=0.5)
    sampler = ShadeSampler(dataset, batch_size=BATCH, seed=0)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=workers)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))  # and not the loader
    seen: list[list[int]] = []
    objects = {"model": model, "optimizer": optimizer}
    loader = AccelerateLoader(accelerator, loader, objects, persist_to=folder, every=1 if folder else "never")
    for _ in range(loader.epoch, epochs):
        for points, labels, indices in loader:
            losses_B = F.cross_entropy(model(points), labels, reduction="none")
            accelerator.backward((losses_B * sampler.weights(indices).to(accelerator.device)).mean())
            sampler.report(indices, losses_B)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(indices.tolist())
    loader.checkpointer.close()
    sampler.close()
    dataset.close()
    accelerator.end_training()
    return seen, model


def main() -> None:
    """Trains three epochs, with the cache that was named."""
    seen, _ = train(*sys.argv[1:2])
    print(f"this rank took {len(seen)} steps with {len({index for step in seen for index in step})} samples")


if __name__ == "__main__":
    main()

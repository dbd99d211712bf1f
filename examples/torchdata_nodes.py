"""Read through the cache in a pipeline of torchdata's nodes, and continue it in the middle of an epoch.

    pip install 'torch-shade[ecosystem]'
    python examples/torchdata_nodes.py

The sampler is the source of the pipeline, so the cache has its plan, and losses decide what is drawn. ``Batcher`` comes
before the samples are read: a batch is then one round to the cache and one to the origin. The state of the ``Loader``
is all that there is to save.

What to know: the state has the place of the batches that the loop got, and the losses that were reported when a batch
was begun. Those of the few batches under way are not in it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset, default_collate
from torchdata import nodes

from shade import ShadeDataset, ShadeSampler

BATCH = 8


def make_data(num_samples: int = 200) -> TensorDataset:
    """Points in four classes, and some noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_samples) % 4
    points = F.one_hot(labels, 16).float() * 2 + torch.randn(num_samples, 16, generator=generator)
    return TensorDataset(points, labels)


def make_loader(dataset: ShadeDataset, sampler: ShadeSampler, num_threads: int = 2) -> nodes.Loader:
    """Indices, batches of indices, batches of samples; a batch is begun in one of the threads."""
    batches = nodes.Batcher(nodes.SamplerWrapper(sampler), sampler.batch_size, drop_last=False)
    samples = nodes.ParallelMapper(batches, dataset.__getitems__, num_workers=num_threads)
    return nodes.Loader(nodes.Mapper(samples, default_collate))


class Training:
    """A model, and all that is needed to continue with it."""

    def __init__(self, num_threads: int = 2) -> None:
        torch.manual_seed(0)
        self.dataset = ShadeDataset(make_data(), cache="local://", working_set_fraction=0.5)
        self.sampler = ShadeSampler(self.dataset, batch_size=BATCH, seed=0)
        self.loader = make_loader(self.dataset, self.sampler, num_threads)
        self.model = torch.nn.Linear(16, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run(self, num_epochs: int, stop_after: int | None = None) -> list[list[int]]:
        """Trains; returns the sample indices of each step. The node counts the epochs."""
        seen: list[list[int]] = []
        for _ in range(num_epochs):
            for points, labels, indices in self.loader:
                losses_B = F.cross_entropy(self.model(points), labels, reduction="none")
                (losses_B * self.sampler.weights(indices)).mean().backward()
                self.sampler.report(indices, losses_B)
                self.optimizer.step()
                self.optimizer.zero_grad()
                seen.append(indices.tolist())
                if len(seen) == stop_after:
                    return seen
        return seen

    def state_dict(self) -> dict[str, Any]:
        """Between two steps."""
        parts = {"loader": self.loader, "model": self.model, "optimizer": self.optimizer}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before the first batch."""
        for name in ("loader", "model", "optimizer"):
            getattr(self, name).load_state_dict(state[name])

    def close(self) -> None:
        """Ends the sampler's thread and the private cache server."""
        self.sampler.close()
        self.dataset.close()


def main() -> None:
    """Trains two epochs in one go, and again with a stop in the second."""
    whole, first, second = Training(), Training(), Training()
    expected = whole.run(2)
    found = first.run(2, stop_after=33)
    second.load_state_dict(first.state_dict())
    found += second.run(1)
    print(f"{len(expected)} steps; the same samples after the stop: {found == expected}")
    print(f"share of the samples from the cache: {whole.dataset.stats()['hit_ratio']:.0%}")
    for training in (whole, first, second):
        training.close()


if __name__ == "__main__":
    main()

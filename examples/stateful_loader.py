"""Stop in the middle of an epoch and go on there, with torchdata's StatefulDataLoader.

    pip install 'torch-shade[ecosystem]'
    python examples/stateful_loader.py

`SampledDataLoader` is a StatefulDataLoader whose state is where training is. ``loader.state_dict()`` is all that there
is to save of the data, and any number of workers may load it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from shade import ShadeDataset
from shade.integrations.torchdata import SampledDataLoader

BATCH = 8


def make_data(num_samples: int = 200) -> TensorDataset:
    """Points in four classes, and some noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_samples) % 4
    points = F.one_hot(labels, 16).float() * 2 + torch.randn(num_samples, 16, generator=generator)
    return TensorDataset(points, labels)


class Training:
    """A model, and all that is needed to go on with it."""

    def __init__(self, workers: int = 0) -> None:
        torch.manual_seed(0)
        self.dataset = ShadeDataset(make_data(), cache="local://", working_set_fraction=0.5)
        self.loader = SampledDataLoader(self.dataset, batch_size=BATCH, sampler={"seed": 0}, num_workers=workers)
        self.sampler = self.loader.sampler
        self.model = torch.nn.Linear(16, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.epoch = 0

    def run(self, epochs: int, stop_after: int | None = None) -> list[list[int]]:
        """Trains; returns the sample indices of each step."""
        seen: list[list[int]] = []
        for epoch in range(self.epoch, epochs):
            self.epoch = epoch
            self.sampler.set_epoch(epoch)
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

    def save(self, path: Path) -> None:
        """Between two steps, or after an epoch."""
        state = {"epoch": self.epoch, "loader": self.loader.state_dict(), "model": self.model.state_dict()}
        torch.save(state | {"optimizer": self.optimizer.state_dict()}, path)

    def restore(self, path: Path) -> None:
        """In a new process, before the first batch."""
        state = torch.load(path, weights_only=True)
        self.epoch = state["epoch"]
        self.loader.load_state_dict(state["loader"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Ends the loader's workers, the sampler's thread and the private cache server."""
        del self.loader
        self.sampler.close()
        self.dataset.close()


def main() -> None:
    """Trains three epochs in one go, and again with a stop in the second."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "training.pt"
        whole, first, second = Training(), Training(), Training()
        expected = whole.run(3)
        found = first.run(3, stop_after=33)
        first.save(path)
        second.restore(path)
        found += second.run(3)
        for training in (whole, first, second):
            training.close()
    print(f"{len(expected)} steps; the same samples after the stop: {found == expected}")


if __name__ == "__main__":
    main()

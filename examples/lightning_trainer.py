"""Train under Lightning's Trainer.

    pip install 'torch-shade[ecosystem]'
    python examples/lightning_trainer.py

Four things to set, and why:

* ``reload_dataloaders_every_n_epochs=1``: an epoch of ``unbiased`` has fewer steps than a full one, and Lightning
  counts the steps only when it asks for the loader. (With ``mode="uniform"`` all epochs are alike: not needed.)
* ``sampler.set_epoch(self.trainer.current_epoch)`` where the loader is made: the steps counted are then this epoch's.
* ``state_dict`` and ``load_state_dict`` of the DataModule are the sampler's: Lightning puts them into every checkpoint.
  What a loader has for a state, it loads only within an epoch: after one that has ended, the scores would be lost.
* A loader whose length is that of the whole epoch: within an epoch, Lightning counts on from the saved step.

``use_distributed_sampler`` may stay as it is: Lightning takes a ShadeSampler for what it is, a sampler that knows the
ranks. Make it after the ranks have met: in ``setup`` or in ``train_dataloader``, not before ``trainer.fit``.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from shade import ShadeDataset, ShadeSampler

BATCH = 8


def make_data(num_samples: int = 200) -> TensorDataset:
    """Points in four classes, and some noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_samples) % 4
    points = F.one_hot(labels, 16).float() * 2 + torch.randn(num_samples, 16, generator=generator)
    return TensorDataset(points, labels)


class EpochLoader(DataLoader[Any]):
    """A DataLoader as Lightning counts: the rest of an epoch is as long as the epoch."""

    def __len__(self) -> int:
        return self.sampler.num_steps

    def state_dict(self) -> dict[str, Any]:
        """None of its own; that there is one says that a checkpoint within an epoch is welcome."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do: the DataModule has loaded the sampler's."""


class Data(L.LightningDataModule):
    """The data set and the sampler; a cache named by URL is the same for all ranks."""

    def __init__(self, cache: str = "local://", workers: int = 0) -> None:
        super().__init__()
        self.cache, self.workers = cache, workers

    def setup(self, stage: str) -> None:
        """Once on every rank, after the ranks have met."""
        self.dataset = ShadeDataset(make_data(), cache=self.cache, working_set_fraction=0.5)
        self.sampler = ShadeSampler(self.dataset, batch_size=BATCH, seed=0)

    def train_dataloader(self) -> EpochLoader:
        """Asked again before every epoch."""
        assert self.trainer is not None
        self.sampler.set_epoch(self.trainer.current_epoch)
        return EpochLoader(self.dataset, batch_size=BATCH, sampler=self.sampler, num_workers=self.workers)

    def state_dict(self) -> dict[str, Any]:
        """For every checkpoint."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """After ``setup``, before the loader is asked for."""
        self.sampler.load_state_dict(state_dict)

    def teardown(self, stage: str) -> None:
        """Ends the sampler's thread and a private cache server."""
        self.sampler.close()
        self.dataset.close()


class Classifier(L.LightningModule):
    """Weighs its losses and reports them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        """One step."""
        points, labels, indices = batch
        sampler = self.trainer.datamodule.sampler
        losses_B = F.cross_entropy(self.layer(points), labels, reduction="none")
        sampler.report(indices, losses_B)
        self.seen.append(indices.tolist())
        return (losses_B * sampler.weights(indices)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(folder: Path, epochs: int = 4, **options: Any) -> L.Trainer:
    """The Trainer with the one flag that matters; the rest keeps an example quiet."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(
        max_epochs=epochs,
        reload_dataloaders_every_n_epochs=1,
        accelerator="cpu",
        default_root_dir=folder,
        **(quiet | {"enable_checkpointing": False} | options),
    )


def main() -> None:
    """Trains four epochs."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = Classifier()
    make_trainer(Path.cwd()).fit(model, datamodule=Data())
    print(f"{len(model.seen)} steps over 4 epochs; a full epoch has 25")


if __name__ == "__main__":
    main()

"""Train under Lightning's Trainer.

    pip install 'torch-shade[ecosystem]'
    python examples/lightning_trainer.py
    torchrun --nproc-per-node 2 examples/lightning_trainer.py redis://127.0.0.1:6379

`ShadeDataModule` is the training data through a cache, with a place in every checkpoint. `ShadeCheckpoints` makes each
checkpoint a snapshot, and a run that was killed continues at any step. ``reload_dataloaders_every_n_epochs=1``: an
epoch of ``unbiased`` has fewer steps than a full one, and Lightning counts the steps only when it asks for the loader.
(With ``mode="uniform"`` all epochs are alike, and the batches are those of the data set inside.)
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset

from shade import ShadeDataset
from shade.integrations.lightning import ShadeCheckpoints, ShadeDataModule

BATCH = 8


def make_data(num_samples: int = 200) -> TensorDataset:
    """Points in four classes, and some noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_samples) % 4
    points = F.one_hot(labels, 16).float() * 2 + torch.randn(num_samples, 16, generator=generator)
    return TensorDataset(points, labels)


def make_module(cache: str = "local://", workers: int = 0) -> ShadeDataModule:
    """The data set and the sampler; a cache named by URL is the same for all ranks."""
    return ShadeDataModule(
        lambda: ShadeDataset(make_data(), cache=cache, working_set_fraction=0.5), BATCH, seed=0, num_workers=workers
    )


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
        devices=int(os.environ.get("WORLD_SIZE", "1")),  # on CPUs, Lightning takes one unless it is told
        default_root_dir=folder,
        **(quiet | {"enable_checkpointing": False} | options),
    )


def main(cache: str = "local://", folder: str = "runs/points") -> None:
    """Trains four epochs; begins where the folder's checkpoints end."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = Classifier()
    saving = [ModelCheckpoint(folder, every_n_train_steps=10, save_last=True), ShadeCheckpoints(f"{folder}/snapshots")]
    trainer = make_trainer(Path(folder), callbacks=saving, enable_checkpointing=True)
    trainer.fit(model, datamodule=make_module(cache), ckpt_path="last")
    print(f"{len(model.seen)} steps over 4 epochs; a full epoch has {200 // BATCH // trainer.world_size}")


if __name__ == "__main__":
    main(*sys.argv[1:])

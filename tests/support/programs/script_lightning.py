"""A script of Lightning, in which three lines are ours; `tests/integration/test_integrations.py` runs it."""

import os
import signal
import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset

from shade.integrations.lightning import ShadeCheckpoints, ShadeDataModule


class Classifier(L.LightningModule):
    """Drops half of its activations."""

    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(16, 32), torch.nn.Dropout(), torch.nn.Tanh(), torch.nn.Linear(32, 4)
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch, batch_index):
        """One step."""
        points, labels = batch
        return torch.nn.functional.cross_entropy(self.net(points), labels)

    def on_train_batch_end(self, outputs, batch, batch_index):
        """Prints the loss."""
        if self.trainer.is_global_zero:
            print(f"loss {self.global_step} {outputs['loss'].item()!r}", flush=True)

    def on_train_batch_start(self, batch, batch_index):
        """Dies where it is told to: after the checkpoint of the step before."""
        if f"{self.global_step}" == os.environ.get("KILL"):
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self):
        """With a rate that falls."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 16), torch.arange(96) % 4)
model = Classifier()
saver = ModelCheckpoint(sys.argv[1], every_n_train_steps=3, save_last=True)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
quiet["devices"] = int(os.environ.get("WORLD_SIZE", "1"))
callbacks = [saver, ShadeCheckpoints(f"{sys.argv[1]}/snapshots")]
trainer = L.Trainer(max_epochs=2, accelerator="cpu", callbacks=callbacks, **quiet)
cached = ShadeDataModule(data, batch_size=8, cache=None, mode="uniform")
trainer.fit(model, datamodule=cached, ckpt_path="last")
if trainer.is_global_zero:
    print(f"weights 0 {[each.double().sum().item() for each in model.parameters()]}")

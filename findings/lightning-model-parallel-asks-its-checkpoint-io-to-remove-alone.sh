#!/bin/sh
# lightning 2.6.6: ModelParallelStrategy takes a CheckpointIO, and asks it to remove checkpoints, never to save or load.
#
# Guess: a Trainer saves, loads and removes through the CheckpointIO of its plugins, or refuses one that it cannot use.
# Seen: under DDP it does. ModelParallelStrategy (FSDP2, tensor parallelism) takes the plugin without a word, writes and
# reads a folder of torch.distributed.checkpoint by itself, and then asks the plugin to remove that folder, which the
# plugin has never seen. Who wants the saves of a split model has to replace methods of the strategy.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.14.1 lightning==2.6.6 numpy 2>/dev/null
cd "$folder"
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import logging
import tempfile
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
calls = {"save": 0, "load": 0, "remove": 0}


class Counting(TorchCheckpointIO):
    def save_checkpoint(self, *args, **kwargs):
        calls["save"] += 1
        return super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args, **kwargs):
        calls["load"] += 1
        return super().load_checkpoint(*args, **kwargs)

    def remove_checkpoint(self, *args, **kwargs):
        calls["remove"] += 1
        return super().remove_checkpoint(*args, **kwargs)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def configure_model(self):
        if self.device_mesh is not None and not hasattr(self.net, "unshard"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, number):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def fit(strategy, steps, path=None):
    folder = Path(tempfile.mkdtemp())
    keep = ModelCheckpoint(path.parent if path else folder, every_n_train_steps=2, save_top_k=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "devices": 1, "max_steps": steps}
    trainer = L.Trainer(strategy=strategy, plugins=[Counting()], callbacks=[keep], **quiet)
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4), ckpt_path=path)
    return Path(keep.best_model_path)


seen = {}
for name, make in (("ddp", lambda: "ddp"), ("ModelParallelStrategy", ModelParallelStrategy)):
    calls.update(save=0, load=0, remove=0)
    path = fit(make(), 4)
    fit(make(), 6, path)
    print(name, calls, "a folder" if path.is_dir() else "")
    seen[name] = dict(calls)

assert seen["ddp"] == {"save": 3, "load": 1, "remove": 1}
assert seen["ModelParallelStrategy"] == {"save": 0, "load": 0, "remove": 1}
PY

"""The comparison that ``shade run`` makes: digits from slow storage, by a plain DataLoader and through shade.

The digits are small files: a fast disk would hide what is compared. This script slows the training folder down in its
own process, in the same way for both (`shade.testing.SlowStorage`), to 20 ms an open and 25 MB/s for all readers
together. ``benchmarks/bench_slow_storage.py`` has used these figures for slow storage before.

A run without a cache (``--cache none``) is the plain one: `ImageFolder` and a DataLoader that shuffles, with the number
of workers that reads fastest. Any other run is ``bench_cifar10.py`` as it stands. Network, optimizer, schedule,
augmentation, validation and epochs are the same.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_cifar10
import networks
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from shade import TrainSession
from shade.testing import SlowStorage

OPEN_SECONDS, BYTES_PER_SECOND = 0.020, 25e6
WORKERS = (4, 8, 16, 32)
"""Tried in turn, as long as one reads the data set faster than the last."""


class PlainRun:
    """A training loop as one writes it without shade, and its record in the launcher's files."""

    def __init__(self, session: TrainSession, storage: SlowStorage) -> None:
        self.config, self.device, self.storage = session.config, session.device, storage
        self.out = Path(self.config.out)
        self.train_set = bench_cifar10.image_folders(self.config.train_paths)
        self.size = bench_cifar10.image_size(self.train_set)
        self.train_set.transform, self.val_view = bench_cifar10.transforms_for(self.size)

    def show(self, **now: Any) -> None:
        """Writes what the launcher's bar shows."""
        aside = self.out / "progress.json.new"
        aside.write_text(json.dumps(now))
        aside.replace(self.out / "progress.json")

    def fastest_loader(self) -> DataLoader[Any]:
        """Doubles the workers until that reads no faster."""
        best, best_seconds = None, float("inf")
        for workers in WORKERS:
            self.show(note=f"plain DataLoader: trying {workers} workers")
            loader = DataLoader(
                self.train_set, self.config.batch_size, shuffle=True, num_workers=workers, persistent_workers=True
            )
            batches = iter(loader)
            began = time.monotonic()
            for _ in batches:
                pass
            seconds = time.monotonic() - began
            print(f"{workers} workers read the data set in {seconds:.2f} s", flush=True)
            if seconds > best_seconds:
                break
            best, best_seconds = loader, seconds
        assert best is not None
        dataclasses.replace(self.config, workers=best.num_workers).save()
        return best

    def batches(self, loader: DataLoader[Any], epoch: int) -> Iterator[Any]:
        """Yields an epoch's batches, and shows how far it is."""
        began, opened, shown = time.monotonic(), self.storage.num_bytes, 0.0
        for step, batch in enumerate(loader):
            yield batch
            seconds = time.monotonic() - began
            if seconds - shown > 0.2:
                shown = seconds
                self.show(
                    epoch=epoch,
                    step=step + 1,
                    num_steps=len(loader),
                    loss=self.loss_sum / max(1, self.num_seen),
                    hit_ratio=0.0,
                    samples_per_second=self.num_seen / seconds,
                    origin_bytes_per_second=(self.storage.num_bytes - opened) / seconds,
                    waiting_fraction=max(0.0, 1 - self.step_seconds / seconds),
                )

    def train(self) -> None:
        """Trains all epochs."""
        loader, config, device = self.fastest_loader(), self.config, self.device
        val_set = bench_cifar10.image_folders(config.val_paths)
        val_set.transform = self.val_view
        val_loader = DataLoader(val_set, config.batch_size)
        model = networks.build(config.network, len(self.train_set.classes), self.size).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4, nesterov=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.epochs)
        scaler = torch.amp.GradScaler(enabled=device.type == "cuda")
        for epoch in range(config.epochs):
            began, opens, num_bytes = time.monotonic(), self.storage.num_opens, self.storage.num_bytes
            self.loss_sum, self.num_seen, self.step_seconds = 0.0, 0, 0.0
            model.train()
            for images, targets in self.batches(loader, epoch):
                came = time.monotonic()
                images, targets = images.to(device), targets.to(device)
                with torch.autocast(device.type, enabled=device.type == "cuda"):
                    loss = F.cross_entropy(model(images), targets)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                self.loss_sum += float(loss.detach()) * len(targets)
                self.num_seen += len(targets)
                self.step_seconds += time.monotonic() - came
            scheduler.step()
            val_loss, val_accuracy = bench_cifar10.validate(model, val_loader, device)
            row = {
                "kind": "epoch",
                "epoch": epoch,
                "rank": 0,
                "num_samples": len(self.train_set),
                "samples": self.num_seen,
                "origin_reads": self.storage.num_opens - opens,
                "origin_bytes": self.storage.num_bytes - num_bytes,
                "epoch_seconds": time.monotonic() - began,
                "loss": self.loss_sum / self.num_seen,
                "val_loss": val_loss,
                "val_accuracy": val_accuracy,
            }
            with (self.out / "metrics.jsonl").open("a") as rows:
                rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    multiprocessing.set_start_method("fork", force=True)  # workers inherit the slow `open`
    with (
        TrainSession.from_environment() as session,
        SlowStorage(session.config.train_paths[0], OPEN_SECONDS, BYTES_PER_SECOND) as storage,
    ):
        if session.config.cache == "none":
            PlainRun(session, storage).train()
        else:
            bench_cifar10.train(session, session.config)
        print(f"slow storage: {storage.num_opens} opens, {storage.num_bytes} bytes", flush=True)

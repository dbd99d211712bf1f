"""The training script to copy from: importance-sampled data-parallel training through a cache.

Read it from top to bottom. Three things differ from a plain DDP script: the data set and the sampler are ours, the
batch brings its sample indices along, and the losses are reported under those indices.

Start it with ``shade run bench_cifar10.py TRAIN_PATH…``; the name is history, any ImageFolder will do.
"""

from __future__ import annotations

import math

import networks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, ShadeSampler, TrainSession
from shade.config import RunConfig
from shade.errors import DataError


def image_folders(paths: tuple[str, ...]) -> ImageFolder:
    """Several folders with the same classes as one data set."""
    first, *others = [ImageFolder(path) for path in paths]
    for other in others:
        if other.classes != first.classes:
            raise DataError.of(
                f"the classes of {paths[0]}: {first.classes}", other.classes, "give folders of one data set"
            )
        first.samples += other.samples
        first.targets += other.targets
    return first


def image_size(dataset: ImageFolder) -> int:
    """Side length to train at: that of small images, 224 for anything larger."""
    width, height = dataset.loader(dataset.samples[0][0]).size
    return max(width, height) if max(width, height) <= 64 else 224


def transforms_for(size: int) -> tuple[transforms.Compose, transforms.Compose]:
    """Augmentation for training, and the plain view for validation."""
    normalize = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)])
    if size > 64:
        return (
            transforms.Compose([transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), normalize]),
            transforms.Compose([transforms.Resize(size * 8 // 7), transforms.CenterCrop(size), normalize]),
        )
    return (
        transforms.Compose(
            [transforms.Resize(size), transforms.RandomCrop(size, padding=max(1, size // 8)), normalize]
        ),
        transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size), normalize]),
    )


@torch.no_grad()
def validate(model: torch.nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """Mean loss and accuracy over the whole validation set; each rank looks at its share."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, targets in loader:
        logits, targets = model(images.to(device)), targets.to(device)
        sums[0] += F.cross_entropy(logits, targets, reduction="sum")
        sums[1] += (logits.argmax(1) == targets).sum()
        sums[2] += len(targets)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def train(session: TrainSession, config: RunConfig) -> None:
    """One rank's whole run."""
    device = session.device
    folder = image_folders(config.train_paths)
    size = image_size(folder)
    train_view, val_view = transforms_for(size)

    dataset = ShadeDataset(
        folder,
        cache=config.cache_url,
        disk=config.disk,
        working_set_fraction=config.working_set_fraction,
        policy=config.policy,
        transform=train_view,
        on_bad_sample=config.on_bad_sample,
    )
    sampler = ShadeSampler(
        dataset,
        batch_size=config.batch_size,
        seed=config.seed,
        mode=config.sampling,
        keep=config.keep,
        replication_factor=config.replication_factor,
        epochs=config.epochs,
    )
    loader = DataLoader(
        dataset,
        batch_size=config.batch_size,
        sampler=sampler,
        num_workers=config.workers,
        persistent_workers=config.workers > 0,
        pin_memory=device.type == "cuda",
    )
    val_loader = None
    if config.val_paths:
        val_set = image_folders(config.val_paths)
        val_set.transform = val_view
        share = Subset(val_set, range(session.rank, len(val_set), session.world_size))
        val_loader = DataLoader(share, batch_size=config.batch_size)

    model = networks.build(config.network, num_classes=len(folder.classes), image_size=size).to(device)
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    optimizer = session.optimizer(torch.optim.SGD, model.parameters(), **settings)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.epochs)
    scaler = torch.amp.GradScaler(enabled=device.type == "cuda")
    replica = session.replica(model, optimizer, scaler)
    session.attach(dataset, sampler, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    if scheduler.T_max != config.epochs:  # a run resumed for more epochs: the snapshot has the old end of the curve
        scheduler.T_max = config.epochs
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 + math.cos(math.pi * scheduler.last_epoch / config.epochs)) / 2

    for epoch in session.epochs():
        sampler.set_epoch(epoch)
        model.train()
        for images, targets, indices in session.batches(loader):
            images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            with torch.autocast(device.type, enabled=device.type == "cuda"):
                logits = replica(images)
                losses_B = F.cross_entropy(logits, targets, reduction="none")
            loss = (losses_B * sampler.weights(indices).to(device)).mean()
            scaler.scale(loss).backward()
            sampler.report(indices, losses_B)
            replica.step()
            session.track(losses_B, logits.argmax(1) == targets)
        learning_rate = optimizer.param_groups[0]["lr"]
        scheduler.step()
        replica.settle()
        val_loss, val_accuracy = validate(model, val_loader, device) if val_loader else (None, None)
        session.end_epoch(epoch, val_loss=val_loss, val_accuracy=val_accuracy, learning_rate=learning_rate)


if __name__ == "__main__":
    with TrainSession.from_environment() as session:
        train(session, session.config)

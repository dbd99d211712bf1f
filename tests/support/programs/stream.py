"""A training script for tests: writes down which samples every rank gets at every step, and can be told to die.

The losses it reports are a function of the sample alone, so that the stream depends on nothing else. The network is a
line and has dropout; the transform draws random numbers: both would tell a resumed run from an uninterrupted one.

``STREAM_LOG`` names a folder, which also learns where the private server is, if there is one; ``STREAM_KILL`` a step
before which rank 0 kills the whole run, launcher first; ``STREAM_KILL_BEFORE_END`` an epoch before whose end it does;
``STREAM_KILL_SERVER`` the process id of a cache server to kill at the first step; ``STREAM_PAUSE`` seconds a step;
``STREAM_FORGET`` something that the losses depend on and no snapshot has; ``STREAM_SAVE_EVERY`` steps between saves;
``STREAM_BALLAST`` numbers that the model has beside the trained ones.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, ShadeSampler, TrainSession

LOG = Path(os.environ["STREAM_LOG"])
KILL = int(os.environ.get("STREAM_KILL", "-1"))
KILL_BEFORE_END = int(os.environ.get("STREAM_KILL_BEFORE_END", "-1"))
PAUSE_SECONDS = float(os.environ.get("STREAM_PAUSE", "0"))
SAVE_EVERY = int(os.environ.get("STREAM_SAVE_EVERY", "3"))
FORGET = os.environ.get("STREAM_FORGET", "")
BALLAST = int(os.environ.get("STREAM_BALLAST", "0"))
SERVER = int(os.environ.get("STREAM_KILL_SERVER", "0"))


def kill_everything() -> None:
    """SIGKILL for the launcher, torch.distributed.run, every rank and every worker, in this order, by process id.

    The cache server and its watchdog are left to find out by themselves: that they do is part of the promise.
    """
    launcher = psutil.Process().parent().parent()
    doomed = [process for process in [launcher, *launcher.children(recursive=True)] if "python" in process.name()]
    for process in doomed:
        if process.pid != os.getpid():
            process.send_signal(signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def note_residents(rank: int, dataset: ShadeDataset) -> None:
    """Writes down whom this rank believes resident, and what they may occupy."""
    cache = dataset.cache
    if cache is not None and cache.policy is not None:
        row = {"residents": cache.policy.resident_N.nonzero()[0].tolist(), "allowed": cache.residency.capacity_bytes}
        with (LOG / f"residents{rank}.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")


def main(session: TrainSession) -> None:
    """One rank's run."""
    config = session.config
    view = transforms.Compose([transforms.RandomCrop(8, padding=2), transforms.ToTensor()])
    dataset = ShadeDataset(
        ImageFolder(config.train_paths[0]),
        cache=config.cache_url,
        disk=config.disk,
        working_set_fraction=config.working_set_fraction,
        policy=config.policy,
        transform=view,
    )
    sampler = ShadeSampler(
        dataset, batch_size=config.batch_size, seed=config.seed, mode=config.sampling, epochs=config.epochs
    )
    loader = DataLoader(
        dataset,
        batch_size=config.batch_size,
        sampler=sampler,
        num_workers=config.workers,
        persistent_workers=config.workers > 0,
    )
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(192, 4))
    model.register_parameter("ballast", torch.nn.Parameter(torch.zeros(BALLAST), requires_grad=False))
    replica = DistributedDataParallel(model) if session.world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    session.attach(dataset, sampler, model=model, optimizer=optimizer, scheduler=scheduler)
    generator = torch.Generator().manual_seed(1)
    model.register_buffer("forgotten", torch.zeros(()), persistent=False)
    if session.rank == 0:
        socket = urlsplit(config.cache_url or "").path if config.cache == "local://" else ""
        (LOG / "server").write_text(str(Path(socket).parent) if socket else "")
    with (LOG / f"rank{session.rank}.jsonl").open("a") as log:
        for epoch in session.epochs():
            sampler.set_epoch(epoch)
            for images, targets, indices in session.batches(loader):
                if session.rank == 0 and session.total_steps == KILL:
                    kill_everything()
                if SERVER and session.rank == 0 and psutil.pid_exists(SERVER):
                    os.kill(SERVER, signal.SIGKILL)
                time.sleep(PAUSE_SECONDS)
                log.write(json.dumps({"step": session.total_steps, "ids": indices.tolist(), "pid": os.getpid()}) + "\n")
                log.flush()
                losses = torch.nn.functional.cross_entropy(replica(images), targets, reduction="none")
                if FORGET == "generator":
                    losses = losses * torch.rand(1, generator=generator)
                if FORGET == "buffer":
                    model.get_buffer("forgotten").add_(1)
                    losses = losses * (1 + model.get_buffer("forgotten"))
                (losses * sampler.weights(indices)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                sampler.report(indices, 0.1 + indices * 7919 % 97 / 97)
                session.track(losses, losses < 1)
                if session.total_steps % SAVE_EVERY == 0:
                    session.save()
            note_residents(session.rank, dataset)
            if session.rank == 0 and epoch == KILL_BEFORE_END:
                kill_everything()
            scheduler.step()
            session.end_epoch(epoch, val_loss=None, val_accuracy=None, learning_rate=0.05)
    if session.rank == 0:
        torch.save(model.state_dict(), LOG / "parameters.pt")


if __name__ == "__main__":
    with TrainSession.from_environment() as session:
        main(session)

"""A small training in which every kind of state matters, run by test_checkpoint_kills.py in processes that it kills."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shade.checkpoint._session.checkpointer import Checkpointer

NUM_SAMPLES, BATCH = 48, 6


@dataclass(frozen=True)
class Job:
    """What all ranks are told."""

    folder: Path
    run: str
    num_steps: int
    world_size: int = 1
    port: int = 0
    store: str | None = None
    persist: str | None = None
    every: int = 4
    strategy: str = "overlap"
    codec: str | None = None
    saves: bool = True


class Cursor:
    """Where a rank is in the data: an epoch's order is drawn from a generator of its own."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.epoch, self.position = 0, 0
        self.generator = torch.Generator().manual_seed(7)
        self.order = torch.randperm(NUM_SAMPLES, generator=self.generator)

    def next(self) -> torch.Tensor:
        """Indices of the next batch."""
        if self.position >= NUM_SAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
            self.order = torch.randperm(NUM_SAMPLES, generator=self.generator)
        chosen = self.order[self.position : self.position + BATCH]
        self.position += BATCH
        return chosen[self.rank :: self.world_size]

    def state_dict(self) -> dict[str, Any]:
        """See `shade.types.Stateful`."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "order": self.order,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `shade.types.Stateful`."""
        self.epoch, self.position, self.order = state["epoch"], state["position"], state["order"].clone()
        self.generator.set_state(state["generator"].clone())


class Log:
    """Lines that are there whole, whatever happens to the process after."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(self, *words: object) -> None:
        """Writes a line."""
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Model, optimizer, scheduler; the same each time."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(32, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)


def digest(model: torch.nn.Module) -> str:
    """Of all parameters, bit for bit."""
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        total.update(name.encode() + parameter.detach().numpy().tobytes())
    return total.hexdigest()[:16]


def train(job: Job, rank: int) -> None:
    """Trains to the end, from the newest snapshot."""
    torch.set_num_threads(1)
    log = Log(job.folder / f"rank-{rank}.log")
    if job.world_size > 1:
        address = f"tcp://127.0.0.1:{job.port}"
        dist.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=job.world_size, timeout=timedelta(seconds=30)
        )
    data = torch.randn(NUM_SAMPLES, 16, generator=torch.Generator().manual_seed(3))
    labels = torch.randint(0, 4, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(4))
    model, optimizer, scheduler = build()
    torch.manual_seed(100 + rank)
    cursor = Cursor(rank, job.world_size)
    wrapped = DistributedDataParallel(model) if job.world_size > 1 else model
    if not job.saves:
        for step in range(1, job.num_steps + 1):
            log.say("step", step, _step(wrapped, optimizer, scheduler, cursor, data, labels))
        log.say("end", digest(model))
        return
    with Checkpointer(
        job.store,
        persist_to=job.persist,
        run=job.run,
        every=job.every,
        strategy=job.strategy,
        codec=job.codec,
        keep="last=2",
    ) as checkpointer:
        checkpointer.attach(model=model, optimizer=optimizer, scheduler=scheduler, cursor=cursor)
        restored = checkpointer.restore_latest()
        log.say("restored", restored.step, digest(model), ",".join(restored.tiers).replace(" ", "-"))
        told = restored.step
        while checkpointer.step_count < job.num_steps:
            loss = _step(wrapped, optimizer, scheduler, cursor, data, labels)
            log.say("step", checkpointer.step_count + 1, loss)
            checkpointer.step({"loss": float.fromhex(loss)})
            step = durable(checkpointer)
            if step > told:
                told = step
                log.say("durable", step)
    log.say("end", digest(model))
    if job.world_size > 1:
        dist.destroy_process_group()


def durable(checkpointer: Checkpointer) -> int:
    """The step of the last save, if it is in storage."""
    handle = checkpointer.latest
    if (
        handle is None
        or checkpointer._tiers.storage is None
        or not handle.committed.done()
        or handle.committed.exception()
    ):
        return 0
    return handle.step if checkpointer._tiers.is_durable(handle.committed.result()) else 0


def _step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    cursor: Cursor,
    data: torch.Tensor,
    labels: torch.Tensor,
) -> str:
    chosen = cursor.next()
    loss = torch.nn.functional.cross_entropy(model(data[chosen]), labels[chosen])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return loss.item().hex()

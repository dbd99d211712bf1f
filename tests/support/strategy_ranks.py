"""Two ranks that train, save and restore under one strategy after the other; run by test_checkpoint_strategy.py."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shade.checkpoint._session.checkpointer import Checkpointer


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same on both ranks, but for what batch normalisation sees."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """One step on data of this rank's own, with gradients of both; the loss, bit for bit."""
    loss = model(torch.randn(6, 8)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    return str(loss.item().hex())


def train_on_two_ranks(rank: int, strategies: Sequence[str], folder: str, run: str, port: int, told: Any) -> None:
    """Tells (strategy, rank, "same") for each, or what was not."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for number, strategy in enumerate(strategies):
        told.put((strategy, rank, _check(rank, strategy, f"{folder}/{number}", f"{run}-{number}")))
    dist.destroy_process_group()


def _check(rank: int, strategy: str, folder: str, run: str) -> str:
    model, optimizer = build()
    torch.manual_seed(100 + rank)
    with Checkpointer(persist_to=folder, run=run, every="never", strategy=strategy) as checkpointer:
        checkpointer.attach(model=model, optimizer=optimizer)
        for _ in range(3):
            step(model, optimizer)
            checkpointer.step()
            checkpointer.save()
        undisturbed = [step(model, optimizer) for _ in range(3)]
        checkpointer.wait_durable()
    model, optimizer = build()
    with Checkpointer(persist_to=folder, run=run, every="never", strategy=strategy) as checkpointer:
        checkpointer.attach(model=model, optimizer=optimizer)
        restored = checkpointer.restore_latest()
        if restored.step != 3:
            return f"step {restored.step}"
        again = [step(model, optimizer) for _ in range(3)]
    return "same" if again == undisturbed else f"{again} instead of {undisturbed}"

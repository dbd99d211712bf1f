"""One rank of a small training that is told of its end: the program that test_checkpoint_notice.py kills.

``python noticed_training.py RANK WORLD_SIZE PORT FOLDER STORE PERSIST GRACE_SECONDS STEP_SECONDS SOURCE…``

Writes into FOLDER/rank-R.log, a line each: ``step N DIGEST`` when a step is done, ``landed N`` when a save has.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

from shade.checkpoint._session.checkpointer import Checkpointer


def run_of(folder: Path) -> str:
    """The id of the run whose logs are in a folder."""
    return f"{folder.parent.name}-{folder.name}"[-90:].lstrip("._-")


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """What is trained: 1 MB with its optimizer."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(250, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
    return model, torch.optim.Adam(model.parameters())


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit that a step changes."""
    total = xxhash.xxh3_128()
    for parameter in model.parameters():
        total.update(parameter.detach().numpy().tobytes())
        for _, value in sorted(optimizer.state[parameter].items()):
            total.update(value.numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    """Trains until it is stopped."""
    rank, world_size, port = map(int, sys.argv[1:4])
    folder, store, persist = Path(sys.argv[4]), sys.argv[5], sys.argv[6] or None
    grace_seconds, step_seconds, sources = float(sys.argv[7]), float(sys.argv[8]), sys.argv[9:]
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    else:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    model, optimizer = build()
    parallel = DistributedDataParallel(model)
    with (
        (folder / f"rank-{rank}.log").open("w", buffering=1) as log,
        Checkpointer(store, persist_to=persist, run=run_of(folder), every=5) as checkpointer,
    ):
        checkpointer.attach(model=model, optimizer=optimizer)
        checkpointer.watch(*sources, grace_seconds=grace_seconds)
        told = 0
        while checkpointer.step_count < 10_000:
            torch.manual_seed(1000 * rank + checkpointer.step_count)
            parallel(torch.randn(8, 250)).square().mean().backward()
            time.sleep(step_seconds)
            optimizer.step()
            optimizer.zero_grad()
            log.write(f"step {checkpointer.step_count + 1} {digest(model, optimizer)}\n")
            checkpointer.step()
            handle = checkpointer.latest
            if handle is not None and handle.step > told and handle.committed.done():
                told = handle.step
                log.write(f"landed {handle.step}\n")


if __name__ == "__main__":
    main()

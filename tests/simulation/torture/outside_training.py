"""A user's training that an outside oracle kills and begins again (`outside`).

It waits until each snapshot is durable and notes that beside ``OUT``, where the oracle does not look; begun again, it
refuses to go on from less. On two ranks its model is sharded (FSDP2).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from shade import Checkpointer
from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint._tiers.storage import StorageTier
from shade.storage import directory
from tests.simulation.torture.warm_start import serve

STEPS, EVERY = 4, 2


class SeenFile:
    """A new file opened by ``open``, which the oracle tears and takes back, and filled as ours are."""

    def __init__(self, path: str) -> None:
        opened = open(path, "xb", buffering=0)  # noqa: SIM115 - the volume closes it
        written = directory.DirectFile(opened.fileno())
        self.write, self.sync, self.close = written.write, written.sync, opened.close


def plant(fault: str) -> None:
    """Makes storage break a promise, which the oracle has to find."""
    prepare = StorageTier.prepare

    def prepared(self: StorageTier, step: int, shard_bytes: Sequence[int]) -> str:
        self._volume.delete_many(self._volume.list(f"{self._run}/step-"))
        return prepare(self, step, shard_bytes)

    if fault == "nothing is synced":
        directory.DirectFile.sync = directory.DirectFile._flush  # type: ignore[method-assign]
    elif fault == "the old is removed before the new is there":
        StorageTier.prepare = prepared  # type: ignore[method-assign]


def run_of(out: Path) -> str:
    """The id of the run whose folder this is."""
    return "outside-" + hashlib.sha256(os.fsencode(out)).hexdigest()[:12]


def main(arguments: list[str]) -> None:
    """Trains to the end, from wherever it is."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--keep", default="all")
    parser.add_argument("--opens", action="store_true", help="files are opened by open()")
    parser.add_argument("--watches", action="store_true", help="SIGTERM is a notice")
    parser.add_argument("--elsewhere", action="store_true", help="another machine: what was in memory is gone")
    parser.add_argument("--fault", default="")
    given = parser.parse_args(arguments)
    plant(given.fault)
    if given.opens:
        directory.OSFileOperations.create = lambda self, path: SeenFile(path)  # type: ignore[method-assign]
    run = run_of(given.out)
    if given.elsewhere and rank == 0:
        shutil.rmtree(own_folder(run), ignore_errors=True)
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 5))
    if world_size > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    promises = given.out.parent / f"promised-{rank}"
    with Checkpointer(persist_to=given.out / "checkpoints", run=run, every=EVERY, keep=given.keep) as checkpointer:
        if given.watches:
            checkpointer.watch("SIGTERM", grace_seconds=3.0)
        checkpointer.attach(model=model, optimizer=optimizer)
        checkpointer.restore_latest()
        first = checkpointer.step_count
        sys.stdout.write(f"resumed from step {first}\n")
        sys.stdout.flush()
        promised = int(promises.read_text()) if promises.exists() else 0
        if first < promised:
            sys.exit(f"step {promised} was durable, step {first} came back")
        for step in range(first, STEPS):
            inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * step + rank))
            F.cross_entropy(model(inputs), inputs[:, :5].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if checkpointer.step():
                checkpointer.wait_durable()
                promises.write_text(str(checkpointer.step_count))
    weights: dict[str, Any] = model.state_dict()
    if world_size > 1:
        weights = {name: each.full_tensor() for name, each in weights.items()}
    if rank == 0:
        torch.save(weights, given.out / "final.part")
        os.replace(given.out / "final.part", given.out / "final.pt")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    for name in ("numba", "torch._dynamo", "torch.distributed.tensor", "shade.checkpoint._session.checkpointer"):
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        serve(listener, main, boot=sys.argv[2])

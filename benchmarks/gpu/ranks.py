"""Runs a function on ranks, a process each, and brings rank 0's result back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gpu.machine import Machine

_PATIENCE = timedelta(seconds=90)


def on_ranks(act: Callable[..., Any], machine: Machine, *words: Any) -> Any:
    """Returns what ``act(machine of the rank, *words)`` returns on rank 0, as JSON brings it back.

    Also where there is one GPU only: so the same lines run everywhere.
    """
    with tempfile.TemporaryDirectory(prefix="shade_gpu_") as folder:
        mp.spawn(_rank, (machine.num_ranks, machine.backend, folder, act, words), nprocs=machine.num_ranks)
        return json.loads((Path(folder) / "result").read_text())


def _rank(rank: int, world_size: int, backend: str, folder: str, act: Callable[..., Any], words: Any) -> None:
    machine = Machine(torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu"))
    if machine.is_gpu:
        torch.cuda.set_device(machine.device)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meeting", world_size)
    # As in a training: our own messages are on the host.
    both = f"cpu:gloo,cuda:{backend}" if machine.is_gpu else backend
    dist.init_process_group(both, store=store, rank=rank, world_size=world_size, timeout=_PATIENCE)
    try:
        result = act(machine, *words)
        if rank == 0:
            (Path(folder) / "result").write_text(json.dumps(result))
    finally:
        dist.destroy_process_group()

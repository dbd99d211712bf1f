"""What does one save cost a rank among thousands, before a byte is written?

Question
    With 2,048 ranks and 1,000 sharded tensors, how long does one rank take to capture its state and to agree with the
    others, at the first save and later, and how much memory does it need?

Method
    One process is one rank of a process group that connects no others (PyTorch's "fake" backend). Each tensor is a
    DTensor of WORLD × 64 numbers over all ranks, or with --replicas over a part of them (HSDP). The agreement gets
    this rank's own message from every rank, encoded and decoded as the messages of 2,048 ranks would be. The network is
    left out: of one save a rank sends one such message and a few short ones.

        capture   state, tree and layout
        manifest  with the digest of the record; no chunks
        agree     all ranks' messages read and compared, the commit record made and written

Command
    python benchmarks/bench_many_ranks.py --world 2048 --tensors 1000 [--replicas 8]

Figures: docs/decisions/0058-split-models.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shade.checkpoint._capture.app_state import AppState
from shade.checkpoint._capture.layout import lay_out
from shade.checkpoint._commit.protocol import agree
from shade.checkpoint._format.manifest import Manifest
from shade.rank_group import SingleProcessGroup

RANK = 7
NUM_COLUMNS = 64


class Alike(SingleProcessGroup):
    """Ranks that all say the same; their messages are encoded and decoded one by one, as of a group that connects."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = RANK, world_size

    def gather(self, message: Any) -> list[Any]:
        """See `RankGroup`."""
        content = np.frombuffer(json.dumps(message).encode(), dtype=np.uint8)
        return [json.loads(each.tobytes()) for each in np.repeat(content[None], self.world_size, 0)]


def sharded(num_tensors: int, world_size: int, num_replicas: int) -> torch.nn.Module:
    """Returns a module of DTensors, one row a rank."""
    shape = (num_replicas, world_size // num_replicas)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    placements, model = [Replicate(), Shard(0)], torch.nn.Module()
    whole = {"shape": torch.Size([shape[1], NUM_COLUMNS]), "stride": (NUM_COLUMNS, 1)}
    for number in range(num_tensors):
        part = DTensor.from_local(torch.zeros(1, NUM_COLUMNS), mesh, placements, run_check=False, **whole)
        model.register_parameter(f"weight{number}", torch.nn.Parameter(part))
    return model


def main() -> None:
    """Prints a line a save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2048, help="ranks (2048)")
    parser.add_argument("--tensors", type=int, default=1000, help="sharded tensors (1000)")
    parser.add_argument("--replicas", type=int, default=1, help="ranks that hold the same part (1)")
    parser.add_argument("--saves", type=int, default=5, help="saves (5)")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=given.world)
    contents, group = AppState(replicated=True), Alike(given.world)
    contents.attach({"model": sharded(given.tensors, given.world, given.replicas)})
    for number in range(given.saves):
        times = [time.perf_counter()]
        captured = contents.capture(RANK, given.world)
        layout = lay_out(captured.specs(), RANK, given.world)
        times.append(time.perf_counter())
        manifest = Manifest(
            "run", number, RANK, given.world, "none", layout.num_bytes, layout.entries, (), captured.tree
        )
        length = len(manifest.to_bytes()) + len(manifest.digest)
        times.append(time.perf_counter())
        record, _, _ = agree(group, manifest, None, sequence=number, saved_at=0.0)
        record.to_bytes()
        times.append(time.perf_counter())
        capture, made, agreed = np.diff(times)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(
            f"save {number}: capture {capture:.3f} s, manifest {made:.3f} s ({length / 1e3:.0f} kB), "
            f"agree {agreed:.3f} s, together {times[-1] - times[0]:.3f} s; memory {memory:.2f} GB"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

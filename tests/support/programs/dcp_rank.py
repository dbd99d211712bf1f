"""One rank of a sharded job that saves and loads through DCP; see tests/integration/test_dcp_ranks.py.

``python dcp_rank.py FOLDER RANK WORLD_SIZE VERB [STORE]``; the verbs are the functions below.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from shade.checkpoint._integrations.dcp_reader import gather_state
from shade.checkpoint._integrations.dcp_shard import PackedState
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.checkpoint._tiers.storage import StorageTier
from shade.checkpoint.dcp import ShadeReader, ShadeWriter

RUN = "job"


class Job:
    """A small model sharded over all ranks, its optimizer, and where it saves."""

    def __init__(self, folder: Path, store: str | None) -> None:
        self.folder, self.places = folder, {"store": store, "persist_to": str(folder / "volume"), "run": RUN}
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.BatchNorm1d(33), torch.nn.Linear(33, 5))
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 7)).pow(2).sum().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "epoch": 3, "names": ["a", ("b", None)]}

    def record(self, name: str, **more: Any) -> None:
        """Rank 0 writes the whole state for the test to compare."""
        whole = _whole(self.state()) | more
        if dist.get_rank() == 0:
            torch.save(whole, self.folder / name)

    def save(self, step: int) -> None:
        with ShadeWriter(**self.places) as writer:
            dcp.save(self.state(), storage_writer=writer, checkpoint_id=str(step))
            writer.wait_durable(60)
            dist.barrier()


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    return value


def save(job: Job) -> None:
    """Trains and saves step 3."""
    job.train(3)
    job.save(3)
    job.record("saved.pt")


def load(job: Job) -> None:
    """Loads the newest step into something else, and saves it again, ten steps later."""
    job.train(1)
    state = job.state() | {"epoch": 0, "names": None}
    with ShadeReader(**job.places) as reader:
        step = reader.steps()[0]
        dcp.load(state, storage_reader=reader)
    set_state_dict(job.model, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    job.record(f"loaded-{step}.pt", epoch=state["epoch"], names=state["names"])
    job.save(step + 10)


def stage(job: Job) -> None:
    """Saves behind the training: with DCP's stager as it comes, with one that keeps shared memory, and by process."""
    group = dist.new_group(backend="gloo")
    job.train(1)
    shared = StagingOptions(False, True, False, False)
    for step, (kind, stager) in enumerate(
        [
            (AsyncCheckpointerType.THREAD, None),
            (AsyncCheckpointerType.THREAD, DefaultStager(shared)),
            (AsyncCheckpointerType.PROCESS, DefaultStager(shared)),
        ]
    ):
        with ShadeWriter(**job.places) as writer:
            job.record("saved.pt")
            response: Any = dcp.async_save(
                job.state(),
                storage_writer=writer,
                checkpoint_id=str(step),
                async_stager=stager,
                async_checkpointer_type=kind,
                process_group=group,
            )
            job.train(2)
            getattr(response, "upload_completion", response).result(120)
            dist.barrier()
        if stager is not None:
            stager.close()


def _kinds(seed: int) -> dict[str, Any]:
    """Tensors of every kind, split over all ranks, and objects; filled by the seed alone."""
    dice, size = torch.Generator().manual_seed(seed), dist.get_world_size()
    flat = dist.init_device_mesh("cpu", (size,))
    grid = dist.init_device_mesh("cpu", (2, 1) if size == 2 else (1, size))

    def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=dice).to(dtype)

    def split(whole: torch.Tensor, dim: int | None = 0, mesh: Any = flat) -> Any:
        # from_local: not every type can be distributed over gloo
        count, place = mesh.shape[-1], mesh.get_local_rank(mesh.ndim - 1)
        length = -(-whole.shape[dim] // count) if dim is not None else 0
        part = whole if dim is None else whole[(slice(None),) * dim + (slice(place * length, (place + 1) * length),)]
        placements = [*[Replicate()] * (mesh.ndim - 1), Replicate() if dim is None else Shard(dim)]
        terms = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(part.clone(), mesh, placements, **terms)

    tied = split(some(6, 2))
    return {
        "split": {
            "rows": split(some(8, 3)),
            "uneven": split(some(7, 5, dtype=torch.bfloat16)),
            "columns": split(some(4, 11), 1),
            "one row": split(some(1, 3)),
            "nothing": split(some(0, 3)),
            "float8": split(some(9, dtype=torch.float8_e5m2)),
            "complex": split(some(5, 2, dtype=torch.complex128)),
            "everywhere": split(some(3), None),
            "large": split(some(900, 1200)),
            "copies": [split(some(7, 3), 0, grid), split(some(4), None, grid)],
            "tied": [tied, tied],
        },
        "plain": [some(3, 2), {"eight": some(5, dtype=torch.float8_e4m3fn), "scalar": some().double()}],
        "objects": {"numbers": [seed * 0.5] * 300, "tuple": (seed, None, b"x"), "name": f"seed {seed}"},
    }


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict | list):
        return [each for part in (value.values() if isinstance(value, dict) else value) for each in _leaves(part)]
    if isinstance(value, torch.Tensor):
        local = (value.to_local() if isinstance(value, DTensor) else value).contiguous()
        return [local.dtype, list(local.shape), local.reshape(-1).view(torch.uint8).tolist()]
    return [value]


def kinds(job: Job) -> None:
    """Saves every kind through our writer and through DCP's own, and a key that each rank alone has."""
    own = {f"own-{dist.get_rank()}": torch.full((3,), dist.get_rank()), f"said-{dist.get_rank()}": dist.get_rank()}
    with ShadeWriter(**job.places) as writer:
        dcp.save(_kinds(1) | own, storage_writer=writer, checkpoint_id="1")
    dcp.save(_kinds(1) | own, checkpoint_id=job.folder / "plain")
    with ShadeReader(**job.places) as reader:
        if dist.get_rank() == 0:
            torch.save(gather_state(reader), job.folder / "gathered.pt")


def other_kinds(job: Job) -> None:
    """Loads them on other ranks, from both."""
    found: list[dict[str, Any]] = []
    for place in (dcp.FileSystemReader(job.folder / "plain"), ShadeReader(**job.places)):
        state = _kinds(2) | {f"own-{rank}": torch.zeros(3).long() for rank in range(2)} | {"said-0": 7, "said-1": 7}
        dcp.load(state, storage_reader=place)
        assert [state["own-0"].tolist(), state["own-1"].tolist()] == [[0] * 3, [1] * 3]
        assert [state["said-0"], state["said-1"]] == [0, 1]
        found.append(state)
    if dist.get_world_size() == 1:
        found.append(torch.load(job.folder / "gathered.pt", weights_only=True))
    for state in found:
        assert _leaves({key: state[key] for key in _kinds(1)}) == _leaves(_kinds(1))


def crash(job: Job) -> None:
    """Saves step 3, then loses rank 1 after its shard of step 4 is written, before anybody can finish."""
    save(job)
    job.train(1)

    def die(*_: Any, **__: Any) -> Any:
        os._exit(9)

    if dist.get_rank() == 1:
        PackedState.check = die  # type: ignore[method-assign]
    try:
        with ShadeWriter(**job.places) as writer:
            dcp.save(job.state(), storage_writer=writer, checkpoint_id="4")
    except (RuntimeError, CheckpointException):
        os._exit(7)


def torn(job: Job) -> None:
    """On rank 1 a parameter moves while it is saved: every rank is told, none waits."""
    job.train(1)
    before = StorageTier.put

    def meanwhile(self: StorageTier, *rest: Any) -> None:
        before(self, *rest)
        if dist.get_rank() == 1:
            job.model[0].weight.to_local().detach().numpy()[0] += 1

    StorageTier.put = meanwhile  # type: ignore[method-assign]
    with ShadeWriter(**job.places) as writer:
        try:
            dcp.save(job.state(), storage_writer=writer, checkpoint_id="3")
        except CheckpointException as error:
            (job.folder / f"told-{dist.get_rank()}").write_text(str(error))
        dist.barrier()


def checkpointer(job: Job) -> None:
    """Replicas, saved by Checkpointer: for plain DCP to read."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.BatchNorm1d(33), torch.nn.Linear(33, 5))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 7)).sum().backward()
    optimizer.step()
    with Checkpointer(persist_to=str(job.places["persist_to"]), run=RUN) as saving:
        saving.attach(model=model, optimizer=optimizer)
        saving.save()
        saving.wait_durable()
    if dist.get_rank() == 0:
        torch.save({f"model/{key}": value for key, value in model.state_dict().items()}, job.folder / "model.pt")


VERBS = {verb.__name__: verb for verb in (save, load, stage, kinds, other_kinds, crash, torn, checkpointer)}


def main(folder: str, rank: str, world_size: str, verb: str, store: str | None = None) -> None:
    faulthandler.dump_traceback_later(150, exit=True)
    warnings.filterwarnings("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting-{verb}-{world_size}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=60),
    )
    VERBS[verb](Job(Path(folder), store))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._integrations.dcp_shard import PackedState
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.checkpoint.dcp import ShadeReader, ShadeStager, ShadeWriter

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
    """Saves three times behind the training, by thread and by process, overlapped or not."""
    group = dist.new_group(backend="gloo")
    job.train(1)
    for step, (kind, overlapped) in enumerate(
        [
            (AsyncCheckpointerType.THREAD, False),
            (AsyncCheckpointerType.THREAD, True),
            (AsyncCheckpointerType.PROCESS, True),
        ]
    ):
        stager = ShadeStager(*([job.optimizer] if overlapped else []))
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
        stager.close()


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
    """On rank 1 a parameter moves while it is staged: every rank is told, none waits."""
    group = dist.new_group(backend="gloo")
    job.train(1)
    before = Copying.finish

    def meanwhile(copying: Copying, *rest: Any) -> None:
        if dist.get_rank() == 1:
            job.model[0].weight.to_local().detach().add_(1)
        before(copying, *rest)

    Copying.finish = meanwhile  # type: ignore[method-assign]
    stager = ShadeStager()
    with ShadeWriter(**job.places) as writer:
        response: Any = dcp.async_save(
            job.state(), storage_writer=writer, checkpoint_id="3", async_stager=stager, process_group=group
        )
        try:
            response.result(60)
        except CheckpointException as error:
            (job.folder / f"told-{dist.get_rank()}").write_text(str(error))
        dist.barrier()
    stager.close()


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


VERBS = {verb.__name__: verb for verb in (save, load, stage, crash, torn, checkpointer)}


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

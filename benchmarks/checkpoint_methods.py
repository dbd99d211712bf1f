"""The ways to checkpoint that `bench_checkpoint` compares: all save the same state and say when it may change.

A method has three verbs. `begin` takes the snapshot; what it needs until it returns blocks. `may_change` returns when
the optimizer may step: a method that copies in the background waits there, which blocks as well. `finish` returns when
everything begun is on the disk. What a library leaves in the page cache is synced for it, so that all reach the same.

Every strategy of the package is a method by the name `shade, <strategy>`, with its own config but for the interval.
What sync, fastpersist and the like wait for beyond the copy is waited for here as in a training. torchsnapshot is here
and is no strategy: it is the package as it is, with its own format (decision 0027).
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from measures import sync
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from shade import Checkpointer
from shade.checkpoint._strategies import STRATEGIES

State = dict[str, Any]


class Method:
    """One way; the base takes no checkpoint at all."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder
        self.durable_seconds: list[float] = []
        self.noted = threading.Event()
        """Set when the seconds of the save begun last are noted: a future wakes its waiters before it calls back."""

    def state(self) -> State:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def begin(self, step: int) -> None:
        pass

    def may_change(self) -> None:
        pass

    def finish(self) -> None:
        pass


class TorchSave(Method):
    """torch.save, in the training thread."""

    def begin(self, step: int) -> None:
        begun = time.perf_counter()
        path = self.folder / f"{step}.pt"
        torch.save(self.state(), path)
        sync(path)
        self.durable_seconds.append(time.perf_counter() - begun)


class Background(Method):
    """What is common to methods that go on in a thread: one save at a time."""

    thread: threading.Thread | None = None

    def run(self, action: Callable[[], Any], begun: float) -> None:
        def work() -> None:
            action()
            self.durable_seconds.append(time.perf_counter() - begun)

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def finish(self) -> None:
        if self.thread is not None:
            self.thread.join()


class TorchSaveThread(Background):
    """Clone everything, torch.save in a thread."""

    def begin(self, step: int) -> None:
        begun = time.perf_counter()
        self.finish()
        cloned = copy.deepcopy(self.state())
        path = self.folder / f"{step}.pt"
        self.run(lambda: (torch.save(cloned, path), sync(path)), begun)


class SafetensorsThread(Background):
    """Clone everything, safetensors in a thread. (The optimizer's numbers are left out; it knows tensors only.)"""

    def begin(self, step: int) -> None:
        from safetensors.torch import save_file

        begun = time.perf_counter()
        self.finish()
        cloned = {f"model.{name}": tensor.clone() for name, tensor in self.model.named_parameters()}
        for number, entry in self.optimizer.state_dict()["state"].items():
            cloned |= {f"optimizer.{number}.{name}": tensor.clone() for name, tensor in entry.items()}
        path = self.folder / f"{step}.safetensors"
        self.run(lambda: (save_file(cloned, path), sync(path)), begun)


class Dcp(Method):
    """torch.distributed.checkpoint.save."""

    def begin(self, step: int) -> None:
        begun = time.perf_counter()
        dcp.save(self.state(), checkpoint_id=self.folder / str(step), no_dist=True)
        self.durable_seconds.append(time.perf_counter() - begun)


class DcpAsync(Method):
    """async_save as it comes."""

    stager: Any = None
    kind = AsyncCheckpointerType.THREAD
    upload: Any = None
    staging: Any = None

    def begin(self, step: int) -> None:
        begun = time.perf_counter()
        self.finish()
        answer = dcp.async_save(self.state(), async_stager=self.stager, **self.words(step))
        self.upload = getattr(answer, "upload_completion", answer)
        self.staging = getattr(answer, "staging_completion", None)
        noted = self.noted = threading.Event()

        def landed(_: Any) -> None:
            self.durable_seconds.append(time.perf_counter() - begun)
            noted.set()

        self.upload.add_done_callback(landed)

    def words(self, step: int) -> dict[str, Any]:
        """Further arguments of `async_save`."""
        no_dist = self.kind is AsyncCheckpointerType.THREAD
        return {"checkpoint_id": self.folder / str(step), "async_checkpointer_type": self.kind, "no_dist": no_dist}

    def may_change(self) -> None:
        if self.staging is not None:
            self.staging.result()

    def finish(self) -> None:
        if self.upload is not None:
            self.upload.result()
            self.noted.wait()


class DcpAsyncReused(DcpAsync):
    """With a stager that keeps its buffers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stager = DefaultStager(StagingOptions(False, False, False, False))


class DcpAsyncOverlapped(DcpAsync):
    """With a stager that copies in a thread; the optimizer's step waits for it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stager = DefaultStager(StagingOptions(False, False, True, False))


class DcpAsyncProcess(DcpAsync):
    """With a stager in shared memory and a process that writes."""

    kind = AsyncCheckpointerType.PROCESS

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
        self.stager = DefaultStager(StagingOptions(False, True, False, False))


class TorchSnapshot(Method):
    """torchsnapshot.Snapshot.take."""

    asynchronous = False
    pending: Any = None

    def begin(self, step: int) -> None:
        import torchsnapshot

        begun = time.perf_counter()
        self.finish()
        app = {"model": self.model, "optimizer": self.optimizer}
        path = self.folder / str(step)
        if not self.asynchronous:
            torchsnapshot.Snapshot.take(str(path), app)
            sync(path)
            self.durable_seconds.append(time.perf_counter() - begun)
            return
        self.pending = (torchsnapshot.Snapshot.async_take(str(path), app), path, begun)

    def finish(self) -> None:
        if self.pending is not None:
            pending, path, begun = self.pending
            pending.wait()
            sync(path)
            self.durable_seconds.append(time.perf_counter() - begun)
            self.pending = None


class TorchSnapshotAsync(TorchSnapshot):
    """torchsnapshot.Snapshot.async_take; what it reports as durable is what was seen when it was asked next."""

    asynchronous = True


def run_id() -> str:
    """Returns the run that this process saves under; all ranks have the first one's."""
    number = [os.getpid()]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(number)
    return f"bench-{number[0]}"


class Shade(Method):
    """Ours: from shared memory straight to storage."""

    strategy = "copy"
    store: str | None = None
    options: Mapping[str, Any] = {}
    """Arguments of the `Checkpointer`, beside the strategy's own config."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.store = os.environ.get("BENCH_STORE") if type(self).store else None
        self.checkpointer = Checkpointer(
            self.store, persist_to=str(self.folder), run=run_id(), strategy=self.strategy, every="never", **self.options
        )
        self.checkpointer.attach(model=self.model, optimizer=self.optimizer)
        self.handles: list[Any] = []
        self.committed_seconds: list[float] = []

    def begin(self, step: int) -> None:
        self.checkpointer.step_count = step
        begun = time.perf_counter()
        handle = self.checkpointer.save()
        self.handles.append(handle)
        self.watch(handle, begun)

    def watch(self, handle: Any, begun: float) -> None:
        noted = self.noted = threading.Event()

        def landed(_: Any) -> None:
            (self.committed_seconds if self.store else self.durable_seconds).append(time.perf_counter() - begun)
            noted.set()

        handle.committed.add_done_callback(landed)

    def may_change(self) -> None:
        self.checkpointer.wait_copy_complete()
        if self.checkpointer.config.step_waits_for == "durable" and self.handles:
            self.checkpointer.wait_durable()

    def finish(self) -> None:
        if self.handles:
            begun = self.handles[-1].begun
            self.checkpointer.wait_durable()
            self.noted.wait()
            if self.store:
                self.durable_seconds.append(time.monotonic() - begun)


class ShadeMemory(Shade):
    """Ours, through a Redis server's memory; a flusher brings it to storage."""

    strategy = "overlap"
    store = "BENCH_STORE"


def shade_with(strategy: str, **options: Any) -> type[Shade]:
    """Ours, by one of its strategies: shade.checkpoint._strategies says what each does."""
    return type(f"Shade, {strategy}", (Shade,), {"strategy": strategy, "options": options})


METHODS: dict[str, type[Method]] = {
    "none": Method,
    "torch.save": TorchSave,
    "torch.save in a thread": TorchSaveThread,
    "safetensors in a thread": SafetensorsThread,
    "DCP save": Dcp,
    "DCP async_save": DcpAsync,
    "DCP async_save, stager reused": DcpAsyncReused,
    "DCP async_save, overlapped": DcpAsyncOverlapped,
    "DCP async_save, process": DcpAsyncProcess,
    "torchsnapshot take": TorchSnapshot,
    "torchsnapshot async_take": TorchSnapshotAsync,
    "shade, copy": Shade,
    "shade, overlap": shade_with("overlap"),
    "shade, asymmetric": shade_with("asymmetric"),
    "shade, overlap, memory": ShadeMemory,
}
"""By the name in the table."""
USUAL = tuple(METHODS)
"""What is compared where nobody names methods: of ours those that are no rival's."""
METHODS |= {f"shade, {name}": shade_with(name) for name in STRATEGIES if f"shade, {name}" not in METHODS}
METHODS["shade, asymmetric, compressed"] = shade_with("asymmetric", codec="zstd", compress="if-faster")
"""AsymCheck's selective compression: a chunk is compressed only where that shortens the save."""

"""The methods that `bench_strategies` compares: every registered strategy, and what else is in use, with a way back.

A method saves as in `checkpoint_methods` (`begin`, `may_change`, `finish`), and also restores: in a new process, into a
model of other weights and an optimizer without a state. A strategy is a name in `STRATEGIES` and needs no line here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import time
from pathlib import Path
from typing import Any

import checkpoint_methods
import measures
import strategy_ablations  # noqa: F401  registers its strategies
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from shade import Checkpointer
from shade.checkpoint._session.checkpointer import tiers_of
from shade.checkpoint._strategies import STRATEGIES
from shade.checkpoint.dcp import ShadeReader, ShadeWriter

RUN = "strategies"
SPARE = "BENCH_SPARE"
POLL_SECONDS = 0.002
"""Between looks whether shared memory holds a snapshot."""


class Nothing(checkpoint_methods.Method):
    """No checkpoint at all: what the others are compared with."""

    def close(self) -> None:
        """Ends what was begun."""


def last(folder: Path, pattern: str) -> Path:
    """What was saved last."""
    return max(folder.glob(pattern), key=lambda path: int(path.stem))


class TorchSave(checkpoint_methods.TorchSave):
    """torch.save, in the training thread."""

    @staticmethod
    def restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Loads what was saved last."""
        state = torch.load(last(folder, "*.pt"), map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


class TorchSaveThread(checkpoint_methods.TorchSaveThread):
    """Clone everything, torch.save in a thread."""

    restore = staticmethod(TorchSave.restore)


class DcpAsync(checkpoint_methods.DcpAsyncReused):
    """torch.distributed.checkpoint.async_save with a stager that keeps its buffers."""

    @staticmethod
    def restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Loads what was saved last; DCP fills tensors that are there, so the optimizer's have to be made first."""
        _make_state(model, optimizer)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=last(folder, "[0-9]*"), no_dist=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


class DcpAsyncOverlapped(checkpoint_methods.DcpAsyncOverlapped):
    """The same with a stager that copies in a thread."""

    restore = staticmethod(DcpAsync.restore)


class TorchSnapshotPackage(checkpoint_methods.TorchSnapshotAsync):
    """torchsnapshot.Snapshot.async_take, as its package comes."""

    @staticmethod
    def restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Loads what was saved last."""
        import torchsnapshot

        _make_state(model, optimizer)
        app = {"model": model, "optimizer": optimizer}
        torchsnapshot.Snapshot(str(last(folder, "[0-9]*"))).restore(app)


def _make_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step with gradients of zero: what the optimizer keeps is there, and the weights are about to be loaded."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


class Strategy(checkpoint_methods.Shade):
    """One of ours; `committed_seconds` is until shared memory holds it, or the store where there is one.

    Its buffers are left in the folder BENCH_SPARE for whoever comes next, under other names: to make new ones, and
    their pages huge, takes as long as all that is measured.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _link(_spare(), tiers_of(self.checkpointer).shared_memory.folder)
        self.num_buffers = self.checkpointer.config.buffers

    def watch(self, handle: Any, begun: float) -> None:
        """Notes when it is kept, and when it has landed."""
        super().watch(handle, begun)
        if self.store is None:
            threading.Thread(target=self._look, args=(handle, begun), daemon=True).start()

    def _look(self, handle: Any, begun: float) -> None:
        while not handle.is_in_shared_memory and not handle.committed.done():
            time.sleep(POLL_SECONDS)
        self.committed_seconds.append(time.perf_counter() - begun)

    def close(self) -> None:
        """Ends what was begun."""
        _link(tiers_of(self.checkpointer).shared_memory.folder, _spare())
        self.checkpointer.close()

    @classmethod
    def restore(cls, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Restores the newest from storage."""
        checkpointer = Checkpointer(persist_to=str(folder), run=run_in(folder), strategy=cls.strategy, every="never")
        checkpointer.attach(model=model, optimizer=optimizer)
        restored = checkpointer.restore_latest()
        checkpointer.close()
        if not restored:
            raise RuntimeError(f"nothing to restore in {folder}")


def _link(source: Path | None, target: Path | None) -> None:
    """Gives buffers a second name, where they have a first one and there is a place for a second."""
    if source is None or target is None:
        return
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in source.glob("*.data"):
        with contextlib.suppress(FileExistsError):
            os.link(path, target / path.name)


def _spare() -> Path | None:
    """Where buffers wait; beside those in use, or there is no second name."""
    return Path(os.environ[SPARE]) if SPARE in os.environ else None


class Fsdp2(checkpoint_methods.DcpAsync):
    """A model sharded by FSDP2, saved by DCP's async_save through our writer, with a stager that copies in a thread;
    restored resharded."""

    options = StagingOptions(False, False, True, False)

    @staticmethod
    def prepare(model: torch.nn.Module) -> None:
        """Shards the model over all ranks; alone, over this one."""
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.group = dist.new_group(backend="gloo")  # the training's own is busy with the training
        self.writer, self.stager = self.parts()

    def parts(self) -> tuple[Any, Any]:
        """Returns the writer, or None for DCP's own, and the stager."""
        return ShadeWriter(persist_to=str(self.folder), run=RUN), DefaultStager(self.options)

    def state(self) -> dict[str, Any]:
        """See `checkpoint_methods`."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def words(self, step: int) -> dict[str, Any]:
        """See `checkpoint_methods`."""
        place = str(self.folder / str(step))
        return {"checkpoint_id": place, "storage_writer": self.writer, "process_group": self.group}

    def close(self) -> None:
        """Ends what was begun."""
        self.stager.close()
        if self.writer is not None:
            self.writer.close()
        dist.destroy_process_group(self.group)

    @staticmethod
    def source(folder: Path) -> dict[str, Any]:
        """Returns what tells `dcp.load` where the last save is."""
        return {"storage_reader": ShadeReader(persist_to=str(folder), run=RUN)}

    @classmethod
    def restore(cls, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Loads what was saved last, into a model sharded now."""
        inside, moments = get_state_dict(model, optimizer)
        state = {"model": inside, "optimizer": moments}
        dcp.load(state, **cls.source(folder))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Fsdp2Dcp(Fsdp2):
    """The same saved by DCP's own writer, with a stager that keeps its buffers."""

    options = StagingOptions(False, False, False, False)

    def parts(self) -> tuple[Any, Any]:
        """See `Fsdp2`."""
        return None, DefaultStager(self.options)

    @staticmethod
    def source(folder: Path) -> dict[str, Any]:
        """See `Fsdp2`."""
        return {"checkpoint_id": str(last(folder, "[0-9]*"))}


class Fsdp2DcpOverlapped(Fsdp2Dcp):
    """The same with a stager that copies in a thread; the optimizer's step waits for it."""

    options = StagingOptions(False, False, True, False)


class Fsdp2Checkpointer(Strategy):
    """A model sharded by FSDP2, attached to a Checkpointer with the default strategy."""

    strategy = "overlap"
    prepare = staticmethod(Fsdp2.prepare)


class Fsdp2TorchCheckpointing(Fsdp2):
    """The same saved by the package torch_checkpointing, staged in shared memory by a thread, written by a process.

    It has no resharder, which needs a GPU, and no O_DIRECT, with which it cannot write to ext4: what it leaves in the
    page cache is synced for it. It is loaded over the mesh that saved.
    """

    staged: Any = None
    written: Any = None

    def parts(self) -> tuple[Any, Any]:
        """See `Fsdp2`; here its manager."""
        return self.manager(), None

    @staticmethod
    def manager() -> Any:
        """Returns a manager for tensors of the CPU."""
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        saver, storage = AsyncCheckpointSaverConfig(staging_config=staging), LocalFileSystemStorageConfig(False)
        return CheckpointManager(CheckpointManager.Config(save=saver, storage_config=storage))

    def begin(self, step: int) -> None:
        """See `checkpoint_methods`."""
        begun = time.perf_counter()
        self.finish()
        place = self.folder / str(step)
        self.written = self.writer.save(str(place), self.state())
        self.staged, noted = self.writer._staging_future, threading.Event()
        self.noted = noted

        def landed(_: Any) -> None:
            if dist.get_rank() == 0:
                measures.sync(place)
            self.durable_seconds.append(time.perf_counter() - begun)
            noted.set()

        self.written.add_done_callback(landed)

    def may_change(self) -> None:
        """See `checkpoint_methods`."""
        if self.staged is not None:
            self.staged.result()

    def finish(self) -> None:
        """See `checkpoint_methods`."""
        if self.written is not None:
            self.written.result()
            self.noted.wait()

    def close(self) -> None:
        """Ends what was begun."""
        self.writer.close()
        dist.destroy_process_group(self.group)

    @classmethod
    def restore(cls, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Loads what was saved last."""
        inside, moments = get_state_dict(model, optimizer)
        manager = cls.manager()
        found = manager.load(str(last(folder, "[0-9]*")), into={"model": inside, "optimizer": moments})
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        manager.close()


def run_in(folder: Path) -> str:
    """The run that was saved there."""
    return next(path.name for path in folder.iterdir() if path.is_dir() and path.name.startswith("bench-"))


OUTSIDE: dict[str, type[Any]] = {
    "torch.save": TorchSave,
    "torch.save-thread": TorchSaveThread,
    "dcp-async": DcpAsync,
    "dcp-async-overlapped": DcpAsyncOverlapped,
    "torchsnapshot-package": TorchSnapshotPackage,
}
"""What is not ours, by the name in the table."""
OURS = [name for name in sorted(STRATEGIES) if name != "dash"]
"""All strategies, each once: `dash` is `acute` by another name."""
CANDIDATES = ["acute", "asymmetric", "copy", "datastates", "deepfreeze", "overlap"]
"""What the default is chosen among (decision 0048): exact, one buffer, no replicas, waits for the copy alone."""
METHODS: dict[str, type[Any]] = {
    "none": Nothing,
    **{
        name: type(name, (Strategy,), {"strategy": name, "__doc__": f"Strategy {name}."}) for name in sorted(STRATEGIES)
    },
    **OUTSIDE,
    "fsdp2": Fsdp2Checkpointer,
    "fsdp2-writer": Fsdp2,
    "fsdp2-dcp": Fsdp2Dcp,
    "fsdp2-dcp-overlapped": Fsdp2DcpOverlapped,
    "fsdp2-torch-checkpointing": Fsdp2TorchCheckpointing,
}
NAMES = ["none", *OURS, *OUTSIDE]
"""Rows of the table. Those of a sharded model are asked for by name."""
if importlib.util.find_spec("torch_checkpointing") is None:
    del METHODS["fsdp2-torch-checkpointing"]
SHARDED = [name for name, method in METHODS.items() if hasattr(method, "prepare")]
"""Methods that shard the model: what several ranks are measured with."""


def leaves_modules_alone(name: str) -> bool:
    """Returns whether a strategy hooks no module."""
    module = torch.nn.Linear(1, 1)
    strategy = STRATEGIES.get(name)()
    strategy.attach([module], [torch.optim.SGD(module.parameters())])
    hooks = [key for key, value in vars(module).items() if key.endswith("_hooks") and value]
    strategy.close()
    return not hooks


def process_of(row: dict[str, Any]) -> tuple[int, str, str]:
    """What two turns have in common that are taken in one process; who shards the model has one of his own, and a
    name in the last place."""
    return row["round"], row["model"], row["method"] if hasattr(METHODS.get(row["method"]), "prepare") else ""


def with_store(method: type[Any]) -> type[Any]:
    """The same through a server's memory, whose address is in BENCH_STORE; what is not ours is left as it is."""
    if issubclass(method, Strategy) and "BENCH_STORE" in os.environ:
        return type(method.__name__, (method,), {"store": "BENCH_STORE"})
    return method

"""Lightning: its checkpoints as snapshots, and a DataModule that resumes at any step.

What is saved when, what is best, what goes and what is saved after an exception says Lightning's `ModelCheckpoint`. To
that we add what Lightning's own checkpoints lack: the random generator of each rank, and the place in the data.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from typing_extensions import override

from shade.checkpoint import Checkpointer, StateDictCheckpointer
from shade.errors import ConfigError
from shade.installation import install_hint

try:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

    from shade.integrations._lightning.data_module import ShadeDataModule
    from shade.integrations._lightning.snapshot_io import SnapshotIO
    from shade.integrations._lightning.split_io import SplitSnapshotIO
    from shade.integrations._lightning.whole_io import WholeSnapshotIO
except ImportError as error:
    raise ConfigError.of("the lightning package", None, install_hint("ecosystem")) from error

__all__ = ["ShadeCheckpoints", "ShadeDataModule"]


class ShadeCheckpoints(Callback):  # type: ignore[misc]
    """Makes all checkpoints of a Trainer snapshots; those that Lightning wrote before are loaded, too.

    Args:
        persist_to: Path or URL of the snapshots; the paths of `ModelCheckpoint` hold notes, and are no URLs.
        run: Id of the run there.
    """

    def __init__(self, persist_to: str | os.PathLike[str], *, run: str = "lightning") -> None:
        self._where: dict[str, Any] = {"persist_to": persist_to, "run": run, "keep": "all"}
        self._io: SnapshotIO | None = None
        self._loaded: dict[str, Any] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        strategy, self._trainer = trainer.strategy, trainer
        if isinstance(strategy, ModelParallelStrategy):
            if isinstance(self._io, SplitSnapshotIO):  # each `fit` has optimizers of its own
                self._io.close()
            self._io = SplitSnapshotIO(strategy, Checkpointer(**self._where, every="never"))
        elif isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
            # All ranks are here; later Lightning saves on the first one alone.
            self._io = self._io or WholeSnapshotIO(StateDictCheckpointer(**self._where, first_rank_saves=True))
        else:
            cure = "leave ShadeCheckpoints out, or use one of these"
            raise ConfigError.of("one device, strategy ddp, or ModelParallelStrategy", type(strategy).__name__, cure)
        strategy.checkpoint_io = self._io

    @override
    def state_dict(self) -> dict[str, Any]:
        here, strategy = torch.get_rng_state(), self._trainer.strategy
        all_W = strategy.all_gather(here.to(strategy.root_device)).reshape(-1, len(here)).cpu()
        return {"generators": all_W, "within_epoch": not self._trainer.is_last_batch}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
        self._put_back()  # before the loader's iterator is made, which draws a seed

    def _put_back(self) -> None:
        rank, generators = self._trainer.global_rank, self._loaded["generators"]
        if rank < len(generators):
            torch.set_rng_state(generators[rank].clone())

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._loaded.get("within_epoch"):  # the seed was drawn before the save; a resume may count from batch 0
            self._put_back()
        self._loaded = {}

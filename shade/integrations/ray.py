"""Ray Train: a loader that saves and resumes the training of a worker; Ray starts the workers again.

Snapshots are what training continues from. What `RayLoader.report` uploads is for those who use the result.
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shade.errors import ConfigError
from shade.installation import install_hint
from shade.integrations._saved_loader import SavedLoader
from shade.types import Stateful

try:
    from ray.train import Checkpoint, get_context, report
except ImportError as error:
    raise ConfigError.of("the ray[train] package", None, install_hint("ecosystem")) from error

__all__ = ["RayLoader"]
_thread = threading.local()


class RayLoader(SavedLoader):
    """Iterates over a worker's loader, saves training between two steps, and resumes it when it is made.

    `epoch` is the one to begin with, as in ``for epoch in range(loader.epoch, epochs)``.

    Args:
        loader: The loader of ``prepare_data_loader``; with a `ShadeSampler`, one that it has not got.
        objects: What is saved beside the place, by name: ``model``, optimizer, scheduler …
        persist_to: Storage that all machines reach, such as a folder beside Ray's ``storage_path``.
        **options: As for `Checkpointer`; the run is named after Ray's experiment.
    """

    def __init__(self, loader: Any, objects: Mapping[str, Stateful], *, persist_to: str | Path, **options: Any) -> None:
        options = {"run": get_context().get_experiment_name()} | options
        super().__init__(loader, objects, persist_to=persist_to, **options)
        self._model = objects["model"]
        _thread.token = token = set[None]()
        weakref.finalize(token, self.checkpointer.close)  # at the thread's end: Ray ends the process by force

    def report(self, metrics: dict[str, Any]) -> None:
        """Reports to Ray and uploads the weights as ``model.pt``; on every worker. Ray's CheckpointConfig keeps the
        best."""
        with tempfile.TemporaryDirectory() as folder:
            is_first = get_context().get_world_rank() == 0
            if is_first:
                torch.save(getattr(self._model, "module", self._model).state_dict(), Path(folder) / "model.pt")
            report(metrics, checkpoint=Checkpoint.from_directory(folder) if is_first else None)

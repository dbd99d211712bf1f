"""Lightning's checkpoints as snapshots: at each path lies a note that names one.

The writer's thread writes the note when the snapshot is committed, and an older checkpoint goes only then. So the
newest note names a whole snapshot, whenever the process ends.
"""

from __future__ import annotations

import json
import shutil
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from shade.checkpoint import Checkpointer
from shade.checkpoint._session.checkpointer import tiers_of
from shade.errors import ShadeError
from shade.process import replacing


class SnapshotIO(TorchCheckpointIO):  # type: ignore[misc]
    """Notes, saves and removes through a checkpointer with ``keep="all"``; removes the files of torch, too."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self._waiting: list[Future[None]] = []
        self._newest = max((each.record.step for each in checkpointer.list()), default=0)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.teardown()
        # One step may be saved under several paths, and again after a resume: each has a number of its own.
        step = self._newest = max(int(checkpoint["global_step"]), self._newest + 1)
        self._save(checkpoint, step)
        self._checkpointer.wait_copy_complete()
        self._once_committed(lambda: self._write_note(Path(path), step))

    @abstractmethod
    def _save(self, checkpoint: dict[str, Any], step: int) -> None: ...

    def _write_note(self, path: Path, step: int) -> None:
        before = step_at(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=True) as beside:
            beside.write_text(json.dumps({"shade.lightning": step}))
            # A file cannot replace a folder, which Lightning itself makes of a model that is split.
            old = path.rename(path.with_name(f".{path.name}.old")) if (path / "meta.pt").is_file() else None
        if old is not None:
            shutil.rmtree(old)
        self._discard(before)

    def _once_committed(self, action: Callable[[], None]) -> None:
        self._waiting.append(done := Future[None]())

        def act(committed: Future[Any] | None) -> None:
            try:
                if committed is None or committed.exception() is None:
                    action()
                done.set_result(None)
            except (OSError, ShadeError) as error:
                done.set_exception(error)

        latest = self._checkpointer.latest
        act(None) if latest is None else latest.committed.add_done_callback(act)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        def remove() -> None:
            step = step_at(path)
            TorchCheckpointIO.remove_checkpoint(self, path)
            self._discard(step)

        self._once_committed(remove)

    def _discard(self, step: int | None) -> None:
        if (storage := tiers_of(self._checkpointer).storage) is not None:
            for place in [place for place, record in storage.held().items() if record.step == step]:
                storage.discard(place)

    @override
    def teardown(self) -> None:
        if self._checkpointer.latest is not None:
            self._checkpointer.wait_committed()
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.result()


def step_at(path: Any) -> int | None:
    """Returns the step that the note at a path names; None if there is no note of ours."""
    try:
        return int(json.loads(Path(path).read_bytes())["shade.lightning"]) if Path(path).stat().st_size < 100 else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
